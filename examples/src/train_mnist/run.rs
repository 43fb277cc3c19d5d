//! Identifies the run that a checkpoint belongs to.
//!
//! A run is defined by network, seed, data, global batch size, learning rates, clipping, communication dtype and
//! precision. A checkpoint of another run is refused, with a line for each difference that names the flag. Ranks,
//! threads, kernels and devices may differ: they only change how sums are rounded, and a line says that the weights
//! will not be bit-equal to those of an uninterrupted run.

use mgpu::checkpoint::Position;
use mgpu_kernels::level;
use serde::{Deserialize, Serialize};

use super::args::Args;
use super::division::Division;
use super::report::EpochReport;
use super::schedule::ScheduleKind;
use super::source::Data;
use crate::nets::Layer;
use crate::parallel::PlacementChoice;

/// The part of a checkpoint that describes its run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) net: String,
    pub(super) seed: u64,
    /// Batch size of rank 0, in images: that of each rank, unless the global batch cannot be divided equally.
    pub(super) batch: usize,
    /// Number of ranks that train on different images.
    pub(super) ranks: u32,
    /// Global batch size in images; none in checkpoints from before it could be chosen: batch times ranks.
    #[serde(default)]
    pub(super) global_batch: Option<u64>,
    /// Initial learning rate.
    pub(super) lr: f64,
    /// Steps until the learning rate reaches its end; none for schedules without an end. Such runs can be extended.
    pub(super) lr_steps: Option<u64>,
    /// Identifier of the launch that saved it, the same after restarts; none without a launcher.
    #[serde(default)]
    pub(super) launch: Option<String>,
    /// The results of the last epoch without those of its evaluation, if the run was stopped in that evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unevaluated: Option<EpochReport>,
    /// The rest, known once data and device are known.
    details: Option<Details>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Details {
    precision: String,
    /// The source of the training images in words, and XXH3 of images and labels.
    data: String,
    data_xxh3: String,
    /// The device, the choice of kernels, and the number of threads (CPU only).
    device: String,
    kernels: String,
    threads: Option<usize>,
    update: Update,
}

/// Everything between the gradients of a micro-batch and the parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Update {
    schedule: String,
    warm_up: u64,
    clip_norm: Option<f64>,
    /// Communication dtype of gradients.
    gradients: String,
    /// How many times the mean the gradients were, and so the optimizer's state, if they were summed.
    #[serde(default)]
    gradient_scale: Option<usize>,
    /// Bucket size in bytes, if chosen.
    bucket: Option<usize>,
    /// Which optimizer state was sharded, if chosen.
    #[serde(default)]
    sharding: Option<String>,
    /// Where the weights were; none in checkpoints from before there was a choice: a copy on every rank.
    #[serde(default)]
    placement: Option<String>,
    /// Their number, and of which ranks, in words.
    micro_batches: String,
    world_size_invariant: bool,
    /// Whether the network has batch normalisation, whose statistics are per micro-batch.
    batch_norm: bool,
}

impl Run {
    /// `division` is that of rank 0.
    pub(super) fn new(args: &Args, division: &Division, ranks: u32, length: u64) -> Self {
        Run {
            net: args.net().name,
            seed: args.seed(),
            batch: division.images().len(),
            ranks,
            global_batch: Some(division.global_batch() as u64),
            lr: args.lr(),
            lr_steps: args.schedule.ends().then_some(length),
            launch: None,
            unevaluated: None,
            details: None,
        }
    }

    /// Completes the description. `gpu` is the name of the GPU, if there is one.
    pub(super) fn describe(&mut self, args: &Args, data: &Data, threads: usize, gpu: Option<&str>) {
        self.details = Some(Details {
            precision: args.precision.name().to_owned(),
            data: data.origin.to_string(),
            data_xxh3: format!("{:016x}", data.train_xxh3),
            device: gpu.map_or_else(|| format!("cpu, {}", level::name()), str::to_owned),
            kernels: args.choice_of_kernels(gpu.is_some()),
            threads: gpu.is_none().then_some(threads),
            update: Update {
                schedule: args.schedule.to_string(),
                warm_up: args.warm_up,
                clip_norm: args.parallel.clip_norm(),
                gradient_scale: args.parallel.gradient_scale(self.ranks),
                gradients: if args.parallel.compresses() { "bf16" } else { "f32" }.to_owned(),
                bucket: args.parallel.bucket_bytes(),
                sharding: args.parallel.sharding().map(str::to_owned),
                placement: Some(args.parallel.placement().to_string()),
                micro_batches: args.parallel.describe_micro_batches(),
                world_size_invariant: args.parallel.is_world_size_invariant(),
                batch_norm: args.net().layers.iter().any(|layer| matches!(layer, Layer::BatchNorm)),
            },
        });
    }

    /// The precision of the training, if it is known.
    pub(super) fn precision(&self) -> Option<&str> {
        self.details.as_ref().map(|details| &details.precision[..])
    }

    /// Whether a checkpoint was saved by the same launch, before or after a restart.
    pub(super) fn is_same_launch(&self, saved: &Run) -> bool {
        self.launch.is_some() && self.launch == saved.launch
    }

    /// Global batch size in images.
    pub(super) fn global_batch(&self) -> u64 {
        self.global_batch.unwrap_or((self.batch as u64).saturating_mul(u64::from(self.ranks)))
    }

    /// Epoch and step within it, after `step` steps.
    pub(super) fn position(&self, step: u64, steps_per_epoch: u64) -> Position {
        Position { seed: self.seed, epoch: step / steps_per_epoch, step: step % steps_per_epoch }
    }

    /// Why a checkpoint belongs to another run: one line per difference.
    pub(super) fn differences(&self, saved: &Run) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare = |flag: &str, saved: String, here: String| {
            if saved != here {
                lines.push(format!("{flag}: {saved} in the checkpoint, {here} here"));
            }
        };
        compare("--net", saved.net.clone(), self.net.clone());
        compare("--seed", saved.seed.to_string(), self.seed.to_string());
        if saved.global_batch() != self.global_batch() {
            compare("--batch", saved.batches(), self.batches());
        }
        compare("--lr", saved.lr.to_string(), self.lr.to_string());
        let (before, now) = (saved.update(), self.update());
        compare("--schedule", before.schedule.clone(), now.schedule.clone());
        if let (Some(saved), Some(here)) = (saved.lr_steps, self.lr_steps) {
            let falls = |steps: u64| format!("a learning rate that decays over {steps} steps");
            compare("--epochs or --steps", falls(saved), falls(here));
        }
        let clipped = |update: &Update| update.clip_norm.map_or("none".to_owned(), |norm| norm.to_string());
        compare("--warm-up", before.warm_up.to_string(), now.warm_up.to_string());
        compare("--clip-norm", clipped(&before), clipped(&now));
        compare("--gradients", before.gradients.clone(), now.gradients.clone());
        compare("--reduction", before.reduction(), now.reduction());
        if now.batch_norm {
            // The statistics would differ, and running statistics would be updated another number of times per step.
            compare(
                "batch normalisation of micro-batches",
                before.micro_batches.clone(),
                now.micro_batches.clone(),
            );
        }
        if let (Some(saved), Some(here)) = (&saved.details, &self.details) {
            compare("--precision", saved.precision.clone(), here.precision.clone());
            if saved.data_xxh3 != here.data_xxh3 {
                compare("--data", with_checksum(saved), with_checksum(here));
            }
        }
        lines
    }

    /// Why a resumed run will not be bit-equal to an uninterrupted one; empty if it will.
    pub(super) fn rounding_differences(&self, saved: &Run) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare = |what: &str, saved: String, here: String| {
            if saved != here {
                lines.push(format!("{what} {here} instead of {saved}"));
            }
        };
        let (before, now) = (saved.update(), self.update());
        if !(before.world_size_invariant && now.world_size_invariant) {
            compare("ranks", saved.ranks.to_string(), self.ranks.to_string());
            let on_gpus = self.details.as_ref().is_some_and(|here| here.threads.is_none());
            if now.clip_norm.is_some() || on_gpus {
                // A norm is summed bucket by bucket, and NCCL's order of summation depends on lengths.
                let bucket =
                    |update: &Update| update.bucket.map_or("default".to_owned(), |bytes| bytes.to_string());
                compare("bytes of a bucket", bucket(&before), bucket(&now));
            }
            if on_gpus {
                let sharding = |update: &Update| update.sharding.clone().unwrap_or("auto".to_owned());
                compare("a sharded optimizer", sharding(&before), sharding(&now));
                compare("placement", before.placement(), now.placement());
            }
        }
        compare("micro-batches", before.micro_batches, now.micro_batches);
        if let (Some(saved), Some(here)) = (&saved.details, &self.details) {
            compare("device", saved.device.clone(), here.device.clone());
            compare("kernels", saved.kernels.clone(), here.kernels.clone());
            if let (Some(saved), Some(here)) = (saved.threads, here.threads) {
                compare("threads", saved.to_string(), here.to_string());
            }
        }
        lines
    }

    /// Checkpoints without this entry were written when these were the only values.
    fn update(&self) -> Update {
        let first = || Update {
            schedule: if self.lr_steps.is_some() { ScheduleKind::Linear } else { ScheduleKind::Constant }
                .to_string(),
            warm_up: 0,
            clip_norm: None,
            gradients: "f32".to_owned(),
            gradient_scale: None,
            bucket: None,
            sharding: None,
            placement: None,
            micro_batches: "1 of each rank".to_owned(),
            world_size_invariant: false,
            batch_norm: false,
        };
        self.details.as_ref().map_or_else(first, |details| details.update.clone())
    }

    fn batches(&self) -> String {
        let Run { batch, ranks, .. } = self;
        let is_even = (*batch as u64).checked_mul(u64::from(*ranks)) == Some(self.global_batch());
        let most = if is_even { "" } else { "at most " };
        format!("{} images a step, {most}{batch} on each of {ranks}", self.global_batch())
    }
}

impl Update {
    fn placement(&self) -> String {
        self.placement.clone().unwrap_or_else(|| PlacementChoice::Replicated.to_string())
    }

    fn reduction(&self) -> String {
        self.gradient_scale
            .map_or("mean".to_owned(), |scale| format!("sum of {scale} micro-batches on all ranks"))
    }
}

fn with_checksum(details: &Details) -> String {
    format!("{} (checksum {})", details.data, details.data_xxh3)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::data::{Dataset, IMAGE_LEN, Origin, Samples};

    fn run() -> Run {
        let args = Args::try_parse_from(["train_mnist", "--net", "keras", "--clip-norm", "1"]).unwrap();
        let mut run = Run::new(&args, &args.division((0, 2)).unwrap(), 2, 100);
        run.describe(&args, &data(), 1, None);
        run
    }

    fn data() -> Data {
        let set = || Samples::from(Dataset { images: vec![0; IMAGE_LEN], labels: vec![0] });
        Data { train: set(), test: set(), origin: Origin::Generated { seed: 1 }, train_xxh3: 7 }
    }

    #[test]
    fn only_a_launch_that_is_known_has_checkpoints_of_its_own() {
        let of = |launch: Option<&str>| Run { launch: launch.map(str::to_owned), ..run() };
        assert!(of(Some("a")).is_same_launch(&of(Some("a"))));
        for (here, saved) in [(Some("a"), Some("b")), (Some("a"), None), (None, Some("a")), (None, None)] {
            assert!(!of(here).is_same_launch(&of(saved)), "{here:?} {saved:?}");
        }
        assert!(of(Some("a")).differences(&of(Some("b"))).is_empty(), "the launch makes no other run");
    }

    #[test]
    fn a_run_with_a_global_batch_continues_on_any_number_of_ranks() {
        let run_with = |batch: [&str; 2], ranks| {
            let args = Args::try_parse_from([&["train_mnist"], &batch[..]].concat()).unwrap();
            Run::new(&args, &args.division((0, ranks)).unwrap(), ranks, 100)
        };
        let three = run_with(["--global-batch", "64"], 3);
        assert_eq!((three.batch, three.global_batch()), (22, 64));
        for other in [run_with(["--global-batch", "64"], 1), run_with(["--batch", "16"], 4)] {
            assert_eq!((three.differences(&other), other.differences(&three)), (vec![], vec![]));
        }
        let differences = three.differences(&run_with(["--batch", "16"], 3));
        let text = "--batch: 48 images a step, 16 on each of 3 in the checkpoint, 64 images a step, at most 22 on each of 3 here";
        assert_eq!(differences, [text]);
        // A checkpoint from before the global batch could be chosen.
        let mut state = serde_json::to_value(run_with(["--batch", "16"], 4)).unwrap();
        state.as_object_mut().unwrap().remove("global_batch");
        assert!(three.differences(&serde_json::from_value(state).unwrap()).is_empty());
    }

    /// On the CPU all placements train the same bits.
    #[test]
    fn another_placement_is_the_same_run() {
        let run_with = |placement: &str, gpu: Option<&str>| {
            let args = Args::try_parse_from(["train_mnist", "--placement", placement]).unwrap();
            let mut run = Run::new(&args, &args.division((0, 2)).unwrap(), 2, 100);
            run.describe(&args, &data(), 1, gpu);
            run
        };
        for (gpu, expected) in
            [(None, &[][..]), (Some("H100"), &["placement host instead of shared".to_owned()][..])]
        {
            let (saved, here) = (run_with("shared", gpu), run_with("host", gpu));
            assert!(here.differences(&saved).is_empty());
            assert_eq!(here.rounding_differences(&saved), expected);
        }
        // A checkpoint from before there were placements.
        let mut state = serde_json::to_value(run_with("replicated", Some("H100"))).unwrap();
        state["details"]["update"].as_object_mut().unwrap().remove("placement");
        let saved: Run = serde_json::from_value(state).unwrap();
        assert_eq!(run_with("replicated", Some("H100")).rounding_differences(&saved), [""; 0]);
        assert_eq!(run_with("shared", Some("H100")).rounding_differences(&saved).len(), 1);
    }

    /// All leaves of `value`: everything that is not an object.
    fn leaves(value: &mut Value) -> Vec<&mut Value> {
        match value {
            Value::Object(entries) => entries.values_mut().flat_map(leaves).collect(),
            leaf => vec![leaf],
        }
    }

    proptest! {
        #[test]
        fn whatever_a_checkpoint_remembers_can_be_compared_or_is_an_error(
            which in any::<prop::sample::Index>(),
            forged in prop::sample::select(vec![
                json!(null), json!(0), json!(-1), json!(u64::MAX), json!(1e308), json!(""), json!("x"), json!(true), json!([]), json!({}),
            ]),
        ) {
            let mut state = serde_json::to_value(run()).unwrap();
            **which.get_mut(&mut leaves(&mut state)[..]) = forged;
            if let Ok(saved) = serde_json::from_value::<Run>(state) {
                let lines = [run().differences(&saved), run().rounding_differences(&saved)].concat();
                prop_assert!(lines.iter().all(|line| !line.is_empty()));
            }
        }
    }
}

//! From a list of layers to shapes, tensors, stages and memory slots.
//!
//! A *stage* is computed as one operation. A convolution or dense layer fuses the activation function that follows
//! it, and a convolution also the pooling layer after that: the convolution's own output is only needed briefly, and
//! only the pooled output is stored.
//!
//! Activations are in *slots*, numbered along the network; slot 0 holds the images. A stage either reads one slot and
//! writes the next, or works in place. Dropout and separate activation functions work in place: their backward passes
//! need only their output (or the key of the mask), and the preceding stage needs at most the sign of its own output.
//!
//! Images have their channels last, \[N, H, W, C\], on the CPU and on GPUs, also when flattened. Only the following
//! dense layer must account for that: its weights expect \[C, H, W\].
//!
//! A plan may be that of a *part* of a network: consecutive stages, whose first slot holds what the part before has
//! computed. Stages, slots and tensors are then numbered within the part; layers keep their indices in the spec, which
//! names of tensors and keys of dropout masks contain.

use std::ops::Range;

use super::layers::{Image, InPlace, LayerContext, Operation};
use super::profile::{Profile, StageTimes};
use super::spec::Spec;
use super::tensors::Tensors;

/// An operation, and the slots it reads and writes (the same one if it works in place).
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) op: Box<dyn Operation>,
    /// Index of its first layer in the spec.
    pub(super) layer: usize,
    pub(super) input: usize,
    pub(super) output: usize,
    /// The image that was flattened into its input, if it has several channels and several positions: the operation's
    /// weights expect \[C, H, W\], but the data is \[H, W, C\].
    pub(super) flattened: Option<Image>,
    /// Whether its products are computed in f32 with all precisions: if it is the first or the last layer of the network
    /// with parameters. The first one sees every pixel's full precision, and the last one's outputs are the logits.
    pub(super) stays_f32: bool,
}

impl Stage {
    /// Index of its first layer, and a description.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.layer, self.op.describe())
    }

    /// True if the gradient of the input overwrites that of the output.
    pub(super) fn backward_in_place(&self) -> bool {
        self.op.in_place() != InPlace::Neither
    }
}

/// A network, or a part of one, with all shapes known.
#[derive(Debug)]
pub(super) struct Plan {
    /// The shape of the input.
    pub(super) image: Image,
    pub(super) stages: Vec<Stage>,
    /// Elements per image in each slot.
    pub(super) slots: Vec<usize>,
    /// The first slot of vectors: the output of the first stage that reads flattened images. All slots before it hold
    /// images. A part without vectors has the number of its slots here.
    pub(super) vectors: usize,
    pub(super) tensors: Tensors,
}

impl Plan {
    /// The times of the stages in a profile. `kernels` describes the kernels of each stage.
    pub(super) fn stage_times(
        &self,
        profile: &Profile,
        kernels: impl Iterator<Item = String>,
    ) -> Vec<StageTimes> {
        let times = |(index, (stage, kernel)): (usize, (&Stage, String))| {
            let [forward, backward] = profile.stage(index);
            // A multiplication and an addition for each product; the gradients of weights and of the input take the
            // same number each.
            let passes = if self.needs_input_gradient(index) { 3.0 } else { 2.0 };
            let operations = passes * 2.0 * stage.op.multiply_adds() as f64 * profile.images();
            let layer = stage.layer;
            StageTimes { layer, name: stage.name(), kernel, forward, backward, operations }
        };
        self.stages.iter().zip(kernels).enumerate().map(times).collect()
    }

    /// The whole network.
    ///
    /// # Panics
    /// If a dense layer follows an image without a `Flatten` between them, a kernel does not fit its image, there is
    /// no dense layer, or the last layer outputs an image.
    pub(super) fn new(spec: &Spec) -> Plan {
        Plan::part(spec, 0..spec.layers.len())
    }

    /// The part of the network that begins with layer `layers.start` and ends before layer `layers.end`: both are
    /// [cuts](Self::cuts), or an end of the network.
    ///
    /// # Panics
    /// As [`new`](Self::new), and if no stage begins in the part.
    pub(super) fn part(spec: &Spec, layers: Range<usize>) -> Plan {
        let mut outside = Tensors::default();
        let mut plan = Plan {
            image: Image::of(spec.input),
            stages: Vec::new(),
            slots: vec![spec.input.iter().product()],
            vectors: 0,
            tensors: Tensors::default(),
        };
        let mut extents = spec.input;
        // The shape in memory.
        let mut image = Image::of(extents);
        for (layer, kind) in spec.layers.iter().enumerate() {
            let rectified = spec.layers.get(layer + 1).is_some_and(|next| next.rectifies());
            if layer == layers.start {
                plan.tensors.before = outside.parameters.tensors().len();
            }
            let tensors = if layers.contains(&layer) { &mut plan.tensors } else { &mut outside };
            let op = kind.plan(tensors, &LayerContext { layer, extents, image, rectified });
            let after = kind.output(extents);
            if let Some(op) = op {
                let flattened = (image != Image::of(extents)).then_some(image);
                image = if op.in_place() == InPlace::Both { image } else { Image::of(after) };
                plan.push(op, layer, flattened, after.iter().product());
            }
            extents = after;
        }
        assert!(
            image.channels == 1 || image.plane == 1,
            "a network ends in a number for each class, not in {image:?}"
        );
        let flat = plan.stages.iter().find(|stage| stage.flattened.is_some() || stage.op.takes_vectors());
        plan.vectors = flat.expect("a network has a dense layer").output;
        let mut trained: Vec<_> =
            plan.stages.iter_mut().filter(|stage| stage.op.weight().is_some()).collect();
        trained.first_mut().into_iter().for_each(|stage| stage.stays_f32 = true);
        trained.last_mut().into_iter().for_each(|stage| stage.stays_f32 = true);
        plan.keep(&layers);
        plan
    }

    /// Keeps the stages that begin in `layers`, and their slots.
    fn keep(&mut self, layers: &Range<usize>) {
        self.stages.retain(|stage| layers.contains(&stage.layer));
        let (first, last) = (&self.stages[0], &self.stages[self.stages.len() - 1]);
        let (first, last) = (first.input, last.output);
        for stage in &mut self.stages {
            stage.input -= first;
            stage.output -= first;
        }
        self.slots = self.slots[first..=last].to_vec();
        self.vectors = self.vectors.saturating_sub(first).min(self.slots.len());
    }

    /// The layers before which the network can be cut into two parts: those that begin a stage that does not work in
    /// place. (One that does overwrites its input, which the stage before needs as it is then.)
    pub(super) fn cuts(&self) -> Vec<usize> {
        let can_begin = |stage: &&Stage| stage.input != stage.output;
        self.stages.iter().skip(1).filter(can_begin).map(|stage| stage.layer).collect()
    }

    /// Whether stage `index` computes the gradient of its input: if a stage before it has parameters.
    pub(super) fn needs_input_gradient(&self, index: usize) -> bool {
        self.tensors.before > 0 || index > self.first_with_parameters()
    }

    /// Adds `op`, with `len` output elements per image.
    fn push(&mut self, op: Box<dyn Operation>, layer: usize, flattened: Option<Image>, len: usize) {
        let in_place = op.in_place() == InPlace::Both;
        // Activation functions do not depend on the order of their inputs.
        let follows = flattened.is_none() || in_place;
        if let Some(epilogue) = op.as_epilogue().filter(|_| follows)
            && let Some(stage) = self.stages.last_mut()
            && stage.op.fuse(epilogue)
        {
            self.slots[stage.output] = len;
            return;
        }
        let input = self.slots.len() - 1;
        if !in_place {
            self.slots.push(len);
        }
        let flattened = flattened.filter(|image| !in_place && image.channels > 1 && image.plane > 1);
        let output = self.slots.len() - 1;
        self.stages.push(Stage { op, layer, input, output, flattened, stays_f32: false });
    }

    /// The shape of the images that are flattened.
    pub(super) fn flattened(&self) -> Image {
        let stage = self.stages.iter().find(|stage| stage.output == self.vectors);
        let flattened = stage.and_then(|stage| stage.flattened);
        flattened.unwrap_or(Image { channels: self.slots[self.vectors - 1], plane: 1 })
    }

    /// The index of the first stage with parameters, or the number of stages if there is none. No gradients are
    /// needed before it, unless there are parameters in a part before this one: then it is 0.
    pub(super) fn first_with_parameters(&self) -> usize {
        if self.tensors.before > 0 {
            return 0;
        }
        self.stages.iter().position(|stage| stage.op.weight().is_some()).unwrap_or(self.stages.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(plan: &Plan) -> Vec<String> {
        plan.stages.iter().map(Stage::name).collect()
    }

    #[test]
    fn layers_fuse_their_epilogues() {
        let plan = Plan::new(&Spec::named("deep").unwrap());
        let expected = [
            "0 conv 64 5x5 same of 1x28x28, relu, pool",
            "3 conv 128 5x5 same of 64x14x14, leaky relu, pool",
            "7 dense 1024 of 6272, relu",
            "9 dropout 0.5",
            "10 dense 10 of 1024",
        ];
        assert_eq!(described(&plan), expected);
        assert_eq!(plan.slots, [784, 64 * 14 * 14, 128 * 7 * 7, 1024, 10]);
        assert_eq!(plan.vectors, 3);
        assert_eq!(plan.stages[2].flattened, Some(Image { channels: 128, plane: 49 }));
        assert_eq!(plan.stages[4].flattened, None);
    }

    #[test]
    fn the_first_and_the_last_layer_with_parameters_stay_f32_in_every_part() {
        let spec = Spec::named("deep").unwrap();
        let stay = |plan: &Plan| {
            plan.stages.iter().filter(|stage| stage.stays_f32).map(|stage| stage.layer).collect::<Vec<_>>()
        };
        assert_eq!(stay(&Plan::new(&spec)), [0, 10]);
        assert_eq!(stay(&Plan::part(&spec, 0..3)), [0]);
        assert_eq!(stay(&Plan::part(&spec, 3..7)), [0usize; 0]);
        assert_eq!(stay(&Plan::part(&spec, 7..11)), [10]);
    }

    #[test]
    fn unfused_layers_are_separate_stages() {
        let plan = Plan::new(&Spec::named("keras").unwrap());
        let described = described(&plan);
        assert_eq!(described.iter().position(|stage| stage == "4 batch norm"), Some(2));
        assert!(described[3].starts_with("5 conv") && described[3].ends_with("pool"), "{described:?}");
        assert_eq!((plan.stages[3].input, plan.stages[3].output), (3, 4));
    }
}

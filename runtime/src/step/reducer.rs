//! The reducer: averages gradients over ranks, without an optimizer.

use mgpu_kernels::Threads;

use super::accumulate::{Accumulator, Counter};
use super::buffers::BufferMean;
use super::clip;
use super::config::{Compression, ReducerConfig, Unused, check_join, check_micro_batches};
use super::gradient_bucket::{Exchange, GradientBucket};
use super::gradient_buckets::{GradientBuckets, Ownership};
use super::guard::Report;
use super::readiness::{Readiness, check_tensor};
use super::sink::{GradientSink, Sink};
use crate::bucket::{self, BucketPlan};
use crate::comm::{Communicator, DType};
use crate::replicate::{verify_layout, verify_settings};
use crate::{Error, Layout, Result};

/// Averages a model's gradients over ranks: in buckets, over micro-batches, with clipping, compression and checks as
/// its [configuration](ReducerConfig) says. For programs with their own optimizer;
/// [`DataParallel`](super::DataParallel) is a `Reducer` with an optimizer.
///
/// The reducer owns the memory of the gradients: the model writes to [`GradientSink::gradient`], and
/// [`gradient`](Self::gradient) returns the averages in the same memory. The program owns the parameters. It makes
/// them equal once ([`replicate`](crate::replicate::replicate)) and must update them identically on all ranks.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::replicate::replicate;
/// use mgpu::{Reducer, ReducerConfig};
/// let mut world = mgpu::World::from_env()?;
/// let mut comm = world.communicator()?;
/// let mut layout = mgpu::Layout::new();
/// let slope = layout.push("slope", [1]);
/// let mut parameters = vec![0.0];
/// replicate(&mut comm, &layout, &mut parameters)?;
/// let mut reducer = Reducer::new(comm, layout, ReducerConfig::new().with_clip_norm(10.0))?;
/// for _ in 0..100 {
///     // Fit y = 3 x at x = 1: the gradient of (slope - 3)² / 2.
///     reducer.reduce(|gradients| gradients.write(slope, &[parameters[0] - 3.0]))?;
///     parameters[0] -= 0.1 * reducer.gradient(slope)?[0];
/// }
/// assert!((parameters[0] - 3.0).abs() < 1e-3);
/// # Ok(())
/// # }
/// ```
pub struct Reducer {
    pub(super) comm: Communicator,
    pub(super) layout: Layout,
    pub(super) buckets: GradientBuckets,
    pub(super) ownership: Ownership,
    readiness: Readiness,
    accumulator: Accumulator,
    config: ReducerConfig,
    /// For checks of large gradients, and a `DataParallel`'s updates.
    pub(super) threads: Threads,
    /// Norm of the last gradients, if they are clipped.
    norm: Option<f64>,
    /// Number of reductions made.
    reductions: u64,
}

/// Which ranks take part in a step with data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Participation {
    /// The step, from 0.
    pub(super) step: u64,
    /// Whether this rank has data.
    pub(super) has_data: bool,
    /// Number of ranks with data.
    pub(super) active: u32,
    /// Number of micro-batches of each of them.
    pub(super) micro_batches: usize,
    /// Their learning rate.
    pub(super) learning_rate: f64,
}

impl Participation {
    /// Gathers which ranks have data; `None` if none has. A rank without data adopts the others' micro-batches and
    /// learning rate. Collective.
    pub(super) fn agree(self, comm: &mut Communicator) -> Result<Option<Self>> {
        let Participation { has_data, micro_batches, learning_rate, .. } = self;
        let mine = [i64::from(has_data), micro_batches as i64, learning_rate.to_bits() as i64];
        let ranks = comm.all_gather_slice(&mine)?;
        let (ranks, _) = ranks.as_chunks::<3>();
        let mut active = ranks.iter().filter(|[has_data, ..]| *has_data != 0);
        let Some([_, micro_batches, rate]) = active.next() else { return Ok(None) };
        let of_all = Participation { active: 1 + active.count() as u32, ..self };
        let (micro_batches, learning_rate) = (*micro_batches as usize, f64::from_bits(*rate as u64));
        Ok(Some(if has_data { of_all } else { Participation { micro_batches, learning_rate, ..of_all } }))
    }
}

impl Reducer {
    /// Prepares averaging the gradients of the tensors of `layout`. Collective.
    ///
    /// # Errors
    /// If the ranks' layouts or settings differ (the error names the first tensor or setting), settings are
    /// incompatible, memory is short, or as the communicator.
    pub fn new(mut comm: Communicator, layout: Layout, config: ReducerConfig) -> Result<Self> {
        config.check(comm.size())?;
        layout.check("reducer")?;
        verify_settings(&mut comm, &config.settings())?;
        verify_layout(&mut comm, &layout)?;
        Self::assemble(comm, layout, config, Ownership::Ranks { shard_from: None }, 1)
    }

    /// As [`new`](Self::new), without comparing layout and settings.
    pub(super) fn assemble(
        mut comm: Communicator,
        layout: Layout,
        config: ReducerConfig,
        ownership: Ownership,
        threads: usize,
    ) -> Result<Self> {
        let threads = Threads::try_new(threads)
            .map_err(|problem| Error::InvalidArgument { operation: "data parallel", problem })?;
        let (rank, ranks) = (comm.rank(), comm.size());
        if config.overlap && ranks > 1 {
            comm = comm.in_background()?;
        }
        let gradients = comm.allocate(DType::F32, layout.len())?;
        let compressed = match config.compression {
            Compression::Bf16 if ranks > 1 => Some(comm.allocate(DType::Bf16, layout.len())?),
            _ => None,
        };
        let (first, rest) = config.host_buckets(comm.capabilities().crosses_network);
        let buckets = bucket::plan(&layout, first, rest);
        let counter = Counter::new(config.micro_batches, config.world_size_invariant);
        Ok(Reducer {
            readiness: Readiness::new(&layout, &buckets, ranks > 1, counter),
            buckets: GradientBuckets::split(
                &layout,
                buckets,
                (gradients, compressed),
                (ownership, rank, ranks),
            ),
            accumulator: Accumulator::new(layout.len()),
            ownership,
            norm: None,
            reductions: 0,
            comm,
            layout,
            config,
            threads,
        })
    }

    /// Averages gradients. `compute` runs forward and backward and provides every gradient, as the mean over this
    /// rank's batch. Returns what `compute` returns. Collective.
    ///
    /// # Errors
    /// As [`reduce_accumulated`](Self::reduce_accumulated); if there are several micro-batches.
    pub fn reduce<R>(&mut self, compute: impl FnOnce(&mut dyn GradientSink) -> Result<R>) -> Result<R> {
        self.check_single("reduce", "reduce_accumulated")?;
        let (mut compute, mut result) = (Some(compute), None);
        self.reduce_accumulated(&mut [], |_, _, gradients| {
            let compute = compute.take().expect("there is one micro-batch");
            result = Some(compute(gradients)?);
            Ok(())
        })?;
        Ok(result.expect("the micro-batch was computed"))
    }

    /// Averages the gradients of all [micro-batches](ReducerConfig::micro_batches), with as much communication as for
    /// one. Collective. `compute` runs forward and backward of each micro-batch; its arguments are the index from 0,
    /// `buffers`, and the sink of gradients. It provides every gradient as the mean over the micro-batch. `buffers`
    /// are the model's running statistics.
    ///
    /// # Errors
    /// Those of `compute` and the communicator. If a tensor's gradient was not marked ready, or twice; the error
    /// names it.
    ///
    /// After the following errors another reduction may be made, but `buffers` are as `compute` has left them:
    /// non-finite gradients of a rank ([`Error::NotFinite`], with rank and tensor); non-finite reduced gradients only
    /// ([`Error::ReducedNotFinite`]); different numbers of micro-batches on the ranks ([`Error::Disagreement`]).
    pub fn reduce_accumulated(
        &mut self,
        buffers: &mut [f32],
        compute: impl FnMut(usize, &mut [f32], &mut dyn GradientSink) -> Result<()>,
    ) -> Result<()> {
        self.make_reduction(true, buffers, compute).map(|_| ())
    }

    /// Takes part in a reduction of the ranks that still have data, with weight 0. Afterwards gradients are the
    /// averages over those ranks, so that this rank's optimizer can make the same update. Returns false, without a
    /// reduction, once no rank has data. A rank that has run out of data calls it until then. Requires
    /// [`join`](ReducerConfig::join). Collective.
    ///
    /// # Errors
    /// As [`reduce_accumulated`](Self::reduce_accumulated); if the configuration has no `join`.
    pub fn join(&mut self) -> Result<bool> {
        self.check_join()?;
        self.make_reduction(false, &mut [], |_, _, _| Ok(()))
    }

    fn make_reduction(
        &mut self,
        has_data: bool,
        buffers: &mut [f32],
        compute: impl FnMut(usize, &mut [f32], &mut dyn GradientSink) -> Result<()>,
    ) -> Result<bool> {
        let Some(participation) = self.agree_on_participation(self.reductions, has_data, 0.0)? else {
            return Ok(false);
        };
        if let Some(buckets) = self.next_buckets()? {
            self.rebuild_buckets(buckets)?;
        }
        self.run(participation, 1.0, buffers, compute)?;
        self.reductions += 1;
        Ok(true)
    }

    /// Agrees with the other ranks on who has data for step `step`; `None` if none has. Collective if ranks may join.
    pub(super) fn agree_on_participation(
        &mut self,
        step: u64,
        has_data: bool,
        learning_rate: f64,
    ) -> Result<Option<Participation>> {
        let (active, micro_batches) = (self.comm.size(), self.config.micro_batches);
        let mine = Participation { step, has_data, active, micro_batches, learning_rate };
        if self.config.join { mine.agree(&mut self.comm) } else { Ok(Some(mine)) }
    }

    /// Computes, averages and checks the gradients of a step, multiplies them by `unscale`, and clips them.
    pub(super) fn run(
        &mut self,
        participation: Participation,
        unscale: f32,
        buffers: &mut [f32],
        mut compute: impl FnMut(usize, &mut [f32], &mut dyn GradientSink) -> Result<()>,
    ) -> Result<()> {
        self.buckets.all.iter_mut().try_for_each(GradientBucket::begin_step)?;
        // A rank without data only contributes zeros, in one micro-batch.
        let micro_batches = if participation.has_data { participation.micro_batches } else { 1 };
        self.readiness.begin_step(micro_batches);
        self.accumulator.begin_step(&self.readiness.counter);
        let mut non_finite = None;
        let is_mean = self.config.world_size_invariant && !buffers.is_empty();
        let mut mean = is_mean.then(|| BufferMean::new(buffers, &self.readiness.counter));
        for index in 0..micro_batches {
            self.readiness.begin_batch(index);
            if let Some(mean) = &mut mean {
                mean.begin_batch(buffers);
            }
            let mut sink = self.sink(&participation, &mut non_finite);
            if participation.has_data {
                compute(index, buffers, &mut sink)?;
            }
            if !participation.has_data || sink.config.unused == Unused::Zero {
                sink.zero_missing()?;
            }
            if let Some(mean) = &mut mean {
                mean.add(&self.readiness.counter, buffers);
            }
            self.readiness.check_complete(&self.layout)?;
        }
        self.buckets.all.iter_mut().try_for_each(GradientBucket::finish_reduction)?;
        if is_mean {
            BufferMean::finish(&mut self.comm, &self.readiness.counter, buffers)?;
        }
        self.compare_reports(&participation, non_finite)?;
        if unscale != 1.0 {
            self.buckets.all.iter_mut().for_each(|bucket| bucket.scale_reduced(unscale));
        }
        self.clip()
    }

    /// The sink of a micro-batch's gradients. `non_finite` receives a tensor with non-finite gradients.
    fn sink<'a>(&'a mut self, participation: &Participation, non_finite: &'a mut Option<usize>) -> Sink<'a> {
        let ReducerConfig { reduction, world_size_invariant: invariant, .. } = self.config;
        let Participation { step, active, .. } = *participation;
        let micro_batches = self.readiness.counter.count();
        Sink {
            comm: &mut self.comm,
            layout: &self.layout,
            buckets: &mut self.buckets.all,
            readiness: &mut self.readiness,
            accumulator: &mut self.accumulator,
            config: &self.config,
            threads: &self.threads,
            exchange: Exchange { reduction, invariant, micro_batches, active },
            step,
            non_finite,
        }
    }

    /// Compares the reports of all ranks. `own` is a tensor with non-finite gradients of this rank.
    fn compare_reports(&mut self, participation: &Participation, own: Option<usize>) -> Result<()> {
        let Self { comm, layout, buckets, config, threads, .. } = self;
        let (rank, ranks) = (comm.rank(), comm.size());
        let reduced = match config.check_finite && ranks > 1 {
            true => {
                let mut buckets = buckets.all.iter();
                buckets.find_map(|bucket| bucket.reduced_non_finite(threads, layout, (rank, ranks)))
            }
            false => None,
        };
        let Participation { step, micro_batches, learning_rate, .. } = *participation;
        Report { own, reduced, micro_batches, learning_rate }.compare(comm, layout, step + 1)
    }

    /// Clips the gradients, if the configuration says so.
    fn clip(&mut self) -> Result<()> {
        let Self { comm, layout, buckets, readiness, config, norm, .. } = self;
        if let Some(most) = config.clip_norm {
            *norm = Some(match config.world_size_invariant {
                true => clip::clip_invariant(layout, readiness, &mut buckets.all, most),
                false => clip::clip(comm, &mut buckets.all, most)?,
            });
        }
        Ok(())
    }

    /// The new buckets, if they change: once the order of gradients is known, the buckets of all ranks follow that of
    /// rank 0's first step. If that is the order of the layout, last tensor first, nothing changes. Collective at
    /// that time.
    pub(super) fn next_buckets(&mut self) -> Result<Option<Vec<BucketPlan>>> {
        let Some(order) = self.readiness.take_observed_order() else { return Ok(None) };
        let sizes = self.config.host_buckets(self.comm.capabilities().crosses_network);
        let buckets = plan_from_order(&mut self.comm, &self.layout, order, sizes)?;
        let current = self.buckets.all.iter().map(|bucket| &bucket.plan);
        Ok(if current.eq(&buckets) { None } else { Some(buckets) })
    }

    /// Splits the arenas into other buckets.
    pub(super) fn rebuild_buckets(&mut self, buckets: Vec<BucketPlan>) -> Result<()> {
        let arenas = std::mem::take(&mut self.buckets).into_arenas()?;
        self.readiness.set_buckets(&buckets);
        let owners = (self.ownership, self.rank(), self.ranks());
        self.buckets = GradientBuckets::split(&self.layout, buckets, arenas, owners);
        Ok(())
    }

    /// The averaged gradient of `tensor` of the last reduction. Collective if the optimizer of a
    /// [`DataParallel`](super::DataParallel) is sharded: a rank only holds the averages of its shards until they are
    /// gathered here.
    ///
    /// # Errors
    /// If there is no such tensor, it is frozen, it was not averaged since the last step began, or as
    /// [`Communicator::all_gather`].
    pub fn gradient(&mut self, tensor: usize) -> Result<&[f32]> {
        check_tensor(&self.layout, "gradient", tensor)?;
        let Some(bucket) = self.readiness.bucket_of(tensor) else {
            let problem =
                format!("tensor `{}` is frozen: it has no gradient", self.layout.tensors()[tensor].name);
            return Err(Error::InvalidArgument { operation: "gradient", problem });
        };
        let bucket = &mut self.buckets.all[bucket];
        let range = bucket.within(&self.layout, tensor);
        Ok(&bucket.averaged(&mut self.comm)?[range])
    }

    /// A copy of all averaged gradients, in the order of the layout; 0 for frozen tensors. Collective like
    /// [`gradient`](Self::gradient).
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    pub fn gradients(&mut self) -> Result<Vec<f32>> {
        let mut all = vec![0.0; self.layout.len()];
        for bucket in &mut self.buckets.all {
            let elements = bucket.elements.clone();
            all[elements].copy_from_slice(bucket.averaged(&mut self.comm)?);
        }
        Ok(all)
    }

    /// The Euclidean norm of the last averaged gradients before clipping; `None` without clipping, or before the
    /// first reduction.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.norm
    }

    /// Names, shapes and offsets of the tensors.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of micro-batches of this rank in each step.
    pub fn micro_batches(&self) -> usize {
        self.config.micro_batches
    }

    /// Sets the number of micro-batches of the following steps. Must be the same on every rank.
    ///
    /// # Errors
    /// If `count` is 0.
    pub fn set_micro_batches(&mut self, count: usize) -> Result<()> {
        check_micro_batches(count)?;
        self.config.micro_batches = count;
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.comm.size()
    }

    /// The communicator, for the program's own collectives between reductions.
    pub fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Checks that `join` is enabled.
    pub(super) fn check_join(&self) -> Result<()> {
        check_join(&self.config)
    }

    /// Checks that a step has one micro-batch; `other` is the method for several.
    pub(super) fn check_single(&self, operation: &'static str, other: &str) -> Result<()> {
        if self.config.micro_batches == 1 {
            return Ok(());
        }
        let problem = format!("there are {} micro-batches: call {other}", self.config.micro_batches);
        Err(Error::InvalidArgument { operation, problem })
    }
}

/// Plans buckets for rank 0's `order` of gradients, the same on all ranks. `sizes` are the bytes of the first bucket
/// and of the others. Collective.
pub(super) fn plan_from_order(
    comm: &mut Communicator,
    layout: &Layout,
    order: Vec<usize>,
    sizes: (usize, usize),
) -> Result<Vec<BucketPlan>> {
    let mut order: Vec<i64> = order.into_iter().map(|tensor| tensor as i64).collect();
    comm.broadcast_slice(&mut order, 0)?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(layout.trained().map(|tensor| tensor as i64)) {
        let problem = "its order of gradients does not contain every tensor once".to_owned();
        return Err(Error::Protocol { peer: "rank 0".into(), problem });
    }
    let order = order.into_iter().map(|tensor| tensor as usize);
    Ok(bucket::plan_in_order(layout, order, sizes.0, sizes.1))
}

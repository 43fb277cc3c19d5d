//! A training step does not allocate after the first one, not even to record a timeline.
//!
//! Allocations of all threads are counted, so this program has no test harness: its main thread allocates while it waits
//! for a test.

use std::alloc::System;

use mgpu::timeline::Timeline;
use mgpu::{GradientSink, Layout, Result};
use mgpu_examples::nets::{DropoutKey, Mode, Net, Spec};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Gradients of one rank, in a flat arena.
struct Sink {
    layout: Layout,
    gradients: Vec<f32>,
}

impl GradientSink for Sink {
    fn gradient(&mut self, tensor: usize) -> &mut [f32] {
        let range = self.layout.range(tensor);
        &mut self.gradients[range]
    }

    fn ready(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn sum_over_ranks(&mut self, _: &mut [f64]) -> Result<()> {
        Ok(())
    }
}

/// Number and bytes of allocations in a step after the first, on one or more threads.
fn of_a_step(name: &str, threads: usize) -> (usize, usize) {
    const BATCH: usize = 3;
    let mut net = Net::new(&Spec::named(name).unwrap(), BATCH, threads);
    net.record_on(&Timeline::new(1000).unwrap());
    let images = vec![0.5; BATCH * net.image_len()];
    let (params, mut buffers) = (net.initial_parameters(1), net.initial_buffers());
    let mut sink = Sink { layout: net.layout().clone(), gradients: vec![0.0; params.len()] };
    let mut step = |step| {
        let mode = Mode::Train { dropout: Some(DropoutKey { seed: 1, step, first_sample: 0 }) };
        net.forward(&params, &mut buffers, &images, mode, &mut sink).unwrap();
        net.backward(&params, &[1, 2, 3], &mut sink).unwrap();
    };
    step(0);
    let region = Region::new(ALLOCATOR);
    step(1);
    let change = region.change();
    (change.allocations + change.reallocations, change.bytes_allocated)
}

fn main() {
    // Together they have every kind of layer and both kinds of convolutions.
    for name in ["lenet5", "deep", "keras", "ensemble2400"] {
        assert_eq!(of_a_step(name, 1), (0, 0), "{name}");
        // Work handed to another thread is boxed until it is done.
        let (_, bytes) = of_a_step(name, 2);
        assert!(bytes < 64 << 10, "{name}: {bytes} bytes");
    }
}

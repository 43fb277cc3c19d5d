//! Traces of steps, launched and captured.

use std::time::Duration;

use mgpu::device::{DeviceDataParallel, DeviceSpan, StepGraph, StepTrace};
use mgpu::timeline::Name;
use mgpu::{Result, ShardFrom, World};

use super::{Inputs, adam, config};

pub(crate) fn check(world: &mut World) -> Result<()> {
    let mut config = config(adam(), 2);
    // Some buckets are sharded.
    config.parallel.shard_from = ShardFrom::from(Some(100_000));
    let mut model = super::model(world, config)?;
    let inputs = Inputs::new(&model, 2)?;
    model.start_trace();
    let error = model.take_trace().expect_err("no step was made").to_string();
    assert!(error.contains("no step was made since a trace was started"), "{error}");
    // Buckets change after the first step.
    inputs.step(&mut model)?;

    model.start_trace();
    inputs.step(&mut model)?;
    let launched = model.take_trace()?;
    model.wait("a traced step")?;
    let launched = spans(&launched, world.size())?;

    model.start_trace();
    let graph = model.capture(|model| inputs.step_with(model, 2))?;
    let captured = model.take_trace()?;
    assert!(captured.read().is_err(), "the step was not executed");
    for _ in 0..2 {
        replay(&mut model, &graph)?;
        let captured = spans(&captured, world.size())?;
        let kind = |span: &DeviceSpan| (span.name, span.number, span.bytes, span.exchange);
        assert!(captured.iter().map(kind).eq(launched.iter().map(kind)), "{captured:?} and {launched:?}");
    }
    // The graph keeps the events.
    drop(captured);
    replay(&mut model, &graph)
}

fn replay(model: &mut DeviceDataParallel, graph: &StepGraph) -> Result<()> {
    model.replay(graph)?;
    model.wait("a replayed step")
}

/// The spans of a step that was executed: they lie within that of the step.
fn spans(trace: &StepTrace, ranks: u32) -> Result<Vec<DeviceSpan>> {
    let spans = trace.read()?;
    let whole = spans.iter().find(|span| span.name == Name::STEP).expect("the step").time.clone();
    assert!(whole.start == Duration::ZERO && whole.end > whole.start, "{whole:?}");
    assert!(
        spans.iter().all(|span| span.time.start <= span.time.end && span.time.end <= whole.end),
        "{spans:?}"
    );
    for (name, is_there) in [
        (Name::OPTIMIZER, true),
        (Name::WAIT_REDUCTIONS, ranks > 1),
        (Name::ALL_REDUCE, ranks > 1),
        (Name::REDUCE_SCATTER, ranks > 1),
        (Name::ALL_GATHER, ranks > 1),
    ] {
        assert_eq!(spans.iter().any(|span| span.name == name), is_there, "{name:?} in {spans:?}");
    }
    Ok(spans)
}

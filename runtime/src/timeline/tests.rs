use super::*;
use crate::comm::{Buffer, DType, ReduceOp};
use crate::{DataParallel, Layout, World};

fn observed(timeline: &Timeline) -> Communicator {
    timeline.observe(Communicator::alone(None))
}

fn names(timeline: &Timeline) -> Vec<Name> {
    timeline.state.as_ref().unwrap().record().spans.iter().map(|recorded| recorded.span.name).collect()
}

#[test]
fn timelines_that_are_off_or_only_count_record_nothing() {
    let off = Timeline::off();
    assert!(off.begin().0.is_none());
    off.end(off.begin(), Name::STEP);
    assert_eq!((off.communication(), off.waiting()), (None, None));
    let mut comm = observed(&off);
    assert!(comm.observer().begin().0.is_none());
    // No file is written either.
    off.write(&mut comm, Path::new("/nonexistent/timeline.json")).unwrap();

    let counting = Timeline::new(0).unwrap();
    counting.set_recording(true);
    let mut comm = observed(&counting);
    comm.barrier().unwrap();
    assert!(counting.begin().0.is_none() && names(&counting).is_empty());
    assert!(counting.communication().is_some());
}

#[test]
fn a_full_record_keeps_the_first_spans_and_counts_the_others() {
    let timeline = Timeline::new(2).unwrap();
    let mut comm = observed(&timeline);
    comm.barrier().unwrap();
    timeline.set_recording(false);
    comm.barrier().unwrap();
    timeline.set_recording(true);
    comm.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap();
    comm.barrier().unwrap();
    assert_eq!(names(&timeline), [Name::new("barrier"), Name::ALL_REDUCE]);
    let record = timeline.state.as_ref().unwrap().record();
    assert_eq!((record.left_out, record.spans.capacity()), (1, 2));
}

#[test]
fn spans_that_began_before_the_recording_are_dropped() {
    let timeline = Timeline::new(2).unwrap();
    timeline.set_recording(false);
    let begin = timeline.begin();
    timeline.set_recording(true);
    timeline.end(begin, Name::STEP);
    assert!(names(&timeline).is_empty());
}

#[test]
fn recording_a_step_does_not_change_its_bits() {
    let train = |comm: Communicator| {
        let mut layout = Layout::new();
        layout.push("first", [64]);
        layout.push("second", [70_000]);
        layout.push("third", [64]);
        let sgd = crate::optimizer::Rule::Sgd(crate::optimizer::Sgd { lr: 0.1, ..Default::default() });
        let config = crate::optimizer::OptimizerConfig::new(sgd);
        let mut model = DataParallel::new(comm, layout, vec![1.0; 70_128], config, 1).unwrap();
        for _ in 0..2 {
            model
                .step(|_, gradients| {
                    for tensor in [2, 1, 0] {
                        gradients.gradient(tensor).fill(0.5);
                        // A reduction of the model's own, without a bucket.
                        gradients.sum_over_ranks(&mut [1.0])?;
                        gradients.ready(tensor)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
        model.parameters().to_vec()
    };
    let timeline = Timeline::new(100).unwrap();
    let alone = train(Communicator::alone(None));
    assert_eq!(train(observed(&timeline)), alone);
    let record = timeline.state.as_ref().unwrap().record();
    let of =
        |name: Name| record.spans.iter().map(|recorded| recorded.span).filter(move |span| span.name == name);
    let numbers = |name| of(name).map(|span| span.number).collect::<Vec<_>>();
    let of_a_step = [None, None, Some(0), None, Some(1)];
    assert_eq!(numbers(Name::ALL_REDUCE), [of_a_step, of_a_step].concat());
    assert_eq!(numbers(Name::STEP), [Some(1), Some(2)]);
    assert_eq!(numbers(Name::OPTIMIZER), [None; 2]);
    let bytes: Vec<_> = of(Name::ALL_REDUCE).map(|span| span.bytes).collect();
    assert_eq!(bytes[..5], [8, 8, 4 * 70_064, 8, 4 * 64]);
}

#[test]
fn the_fused_update_does_not_count_as_communication() {
    for ranks in [2, 3] {
        let worlds = World::threads(ranks).unwrap();
        std::thread::scope(|scope| {
            for mut world in worlds {
                scope.spawn(move || {
                    let timeline = Timeline::new(100).unwrap();
                    let mut comm = timeline.observe(world.communicator().unwrap());
                    for in_arena in [true, false] {
                        let buffer = match in_arena {
                            true => comm.allocate(DType::F32, 1 << 12).unwrap(),
                            false => Buffer::zeroed::<f32>(1 << 12),
                        };
                        let before = timeline.communication().unwrap();
                        let (mut updating, whole) = (0, now());
                        let mut update = |_: usize, _: usize, block: &mut Buffer| {
                            let begin = now();
                            block.as_mut_slice::<f32>().fill(1.0);
                            updating += now() - begin;
                        };
                        let segments = [0..1000, 1000..4000];
                        let gathered = comm.update_all_gather(buffer, &segments, 100, &mut update).unwrap();
                        let gathered = gathered.wait().unwrap();
                        let whole = now() - whole;
                        assert!(gathered.as_slice::<f32>()[..4000].iter().all(|value| *value == 1.0));
                        // A second clock around the same blocks, and one around everything: the sums must be
                        // consistent.
                        let counted = (timeline.communication().unwrap() - before).as_nanos() as u64;
                        assert!(counted + updating <= whole, "{counted} and {updating} of {whole} ns");
                    }
                    let record = timeline.state.as_ref().unwrap().record();
                    let last = |name: Name| {
                        record.spans.iter().map(|recorded| recorded.span).rfind(|span| span.name == name)
                    };
                    let [gather, wait, update] =
                        [Name::ALL_GATHER, Name::WAIT, Name::UPDATE].map(|name| last(name).unwrap());
                    for part in [wait, update] {
                        assert!(gather.begin <= part.begin && part.end <= gather.end);
                    }
                    assert!(wait.end <= update.begin || update.end <= wait.begin, "{wait:?} {update:?}");
                    assert_eq!(gather.bytes, 16_000);
                });
            }
        });
    }
}

#[test]
fn operations_of_groups_have_the_title_of_the_group() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    std::thread::scope(|scope| {
        for mut world in World::threads(4).unwrap() {
            let path = &path;
            scope.spawn(move || {
                let timeline = Timeline::new(100).unwrap();
                let mut comm = timeline.observe(world.communicator().unwrap());
                let mut row = comm.split(Some(comm.rank() / 2), 0).unwrap().unwrap();
                let column = comm.split(Some(comm.rank() % 2), 0).unwrap().unwrap();
                let mut column = column.in_background().unwrap();
                for _ in 0..2 {
                    let buffer = Buffer::zeroed::<f32>(4);
                    row.all_reduce_tagged(buffer, ReduceOp::Sum, Some(7)).unwrap().wait().unwrap();
                    column.all_reduce(Buffer::zeroed::<f32>(8), ReduceOp::Sum).unwrap().wait().unwrap();
                }
                comm.barrier().unwrap();
                timeline.write(&mut comm, path).unwrap();
            });
        }
    });
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let spans = |name: &str| -> Vec<_> {
        let events = file["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == name);
        events.map(|event| (event["tid"].as_u64().unwrap(), event["args"].clone())).collect()
    };
    let [bucket, none] = [serde_json::json!({"bucket": 7, "bytes": 16}), serde_json::json!({"bytes": 32})];
    for (name, threads, args) in [
        ("all_reduce, group 1 (ranks 0, 1)", [1, 1, 2, 2], &bucket),
        ("all_reduce, group 1 (ranks 2, 3)", [3, 3, 4, 4], &bucket),
        // Their background threads.
        ("all_reduce, group 2 (ranks 0, 2)", [5, 5, 7, 7], &none),
        ("all_reduce, group 2 (ranks 1, 3)", [6, 6, 8, 8], &none),
    ] {
        let found = spans(name);
        assert_eq!(found.iter().map(|(thread, _)| *thread).collect::<Vec<_>>(), threads, "{name}");
        assert!(found.iter().all(|(_, found)| found == args), "{found:?}");
    }
    assert_eq!(spans("all_reduce"), []);
    // At least one of each rank.
    assert!(spans("barrier").len() >= 4);
}

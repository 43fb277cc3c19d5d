//! What the own node and a signal do to the end of the job.

use super::super::*;
use crate::nodes::card::tests::card;
use crate::supervisor::Exit;

const B: MemberId = 1;

/// Two nodes with two ranks each; the ranks run.
fn running(max_restarts: u32) -> (Coordinator, Instant) {
    let (second, now) = (Duration::from_secs(1), Instant::now());
    let config = Config {
        nodes: 2..=2,
        join_timeout: 60 * second,
        node_timeout: 30 * second,
        grace: second,
        stop_grace: second,
        restart: RestartPolicy { max_restarts, always: true },
        run_id: "run".into(),
        master_port: 1,
    };
    let mut coordinator = Coordinator::new(config, card("a", None), now);
    coordinator.connected(B, None, now);
    coordinator.handle(B, FromAgent::Join(Box::new(card("b", None))), now).unwrap();
    let started = coordinator.take_outbox();
    assert!(matches!(&started[..], [(OWN, ToAgent::Start(_)), (B, ToAgent::Start(_))]), "{started:?}");
    (coordinator, now)
}

/// The members that are told that the job is over, and its outcome.
fn ended(coordinator: &mut Coordinator) -> Option<(Vec<MemberId>, Outcome)> {
    let outbox = coordinator.take_outbox().into_iter();
    let ends = outbox.filter_map(|(id, message)| match message {
        ToAgent::End { outcome } => Some((id, outcome)),
        _ => None,
    });
    let (members, outcomes): (Vec<_>, Vec<_>) = ends.unzip();
    Some((members, outcomes.into_iter().next()?))
}

#[test]
fn the_failure_of_the_own_node_ends_the_job_on_all_nodes_and_this_one() {
    let (mut coordinator, now) = running(3);
    coordinator.handle(OWN, FromAgent::Failed { why: "no room".into() }, now).unwrap();
    let (members, outcome) = ended(&mut coordinator).unwrap();
    assert_eq!((members, outcome.exit_code), (vec![OWN, B], exit_code::NODE_LOST));
    assert_eq!(outcome.message.unwrap(), "mgpurun on a failed: no room; it coordinates the job, which ends");
}

#[test]
fn a_signal_while_nodes_clean_up_prevents_a_restart() {
    for interrupts in [false, true] {
        let (mut coordinator, now) = running(3);
        for (id, rank) in [(OWN, 0), (OWN, 1), (B, 2), (B, 3)] {
            let exit = Exit::Code(3);
            let message = FromAgent::Exited { rank, exit, blame: None, last_lines: Vec::new() };
            coordinator.handle(id, message, now).unwrap();
        }
        coordinator.handle(OWN, FromAgent::Gone { reader_is_gone: false }, now).unwrap();
        if interrupts {
            coordinator
                .handle(B, FromAgent::Signalled { signal: Signal::SIGINT as i32, can_stop: false }, now)
                .unwrap();
        }
        coordinator.handle(B, FromAgent::Gone { reader_is_gone: false }, now).unwrap();
        let end = ended(&mut coordinator);
        assert_eq!(end.map(|(_, outcome)| outcome.exit_code), interrupts.then_some(3));
    }
}

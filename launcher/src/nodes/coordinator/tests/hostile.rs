//! An agent that says anything. It can make the job fail, and no more.

use mgpu_control::nodes::{RankEnd, RelayMessage};
use mgpu_control::rendezvous::{Blame, ProcessEnd};

use super::*;

fn relayed() -> impl Strategy<Value = RelayMessage> {
    let end = |rank| RankEnd { rank, end: ProcessEnd::Finished, blame: None };
    prop_oneof![
        Just(RelayMessage::Admit),
        (0u32..6, 0u32..6).prop_map(|(reader, from)| RelayMessage::Get {
            reader,
            number: 1,
            key: "k".into(),
            from
        }),
        (0u32..6, prop::option::of(prop::collection::vec(0u32..6, 0..4))).prop_map(|(rank, ranks)| {
            RelayMessage::Arrived { barrier: "b".into(), ranks, arrived: vec![rank] }
        }),
        prop::collection::vec(0u32..6, 0..3).prop_map(|ranks| RelayMessage::Left { ranks }),
        Just(RelayMessage::AskToStop),
        Just(RelayMessage::ProposeStop),
        any::<u64>().prop_map(|check| RelayMessage::StopBound { check }),
        any::<u64>().prop_map(|check| RelayMessage::StopAt { check }),
        (0u32..6).prop_map(move |rank| RelayMessage::Ended { ends: vec![end(rank)] }),
    ]
}

fn anything() -> impl Strategy<Value = FromAgent> {
    let rank = || prop_oneof![4 => 2u32..4, 1 => Just(0u32), 1 => any::<u32>()];
    let blame = |culprit| Blame { culprit, timed_out: false, message: "it".into() };
    prop_oneof![
        Just(FromAgent::Join(Box::new(card("b", None)))),
        prop::collection::vec(relayed(), 0..4).prop_map(|messages| FromAgent::Relay { messages }),
        rank().prop_map(|rank| FromAgent::Joined { rank }),
        rank().prop_map(|rank| FromAgent::Incompatible { rank, exit_code: 1, why: "no".into() }),
        rank().prop_map(|rank| FromAgent::Silent { rank, idle: Duration::MAX, doing: "x".into() }),
        (rank(), any::<i32>(), prop::option::of(any::<u32>())).prop_map(move |(rank, code, culprit)| {
            let exit = if code % 2 == 0 { Exit::Code(code % 4) } else { Exit::Signal(code) };
            FromAgent::Exited { rank, exit, blame: culprit.map(blame), last_lines: vec!["x".into()] }
        }),
        (rank(), rank()).prop_map(|(rank, stopped)| FromAgent::Progress {
            entries: vec![(rank, entry(2))],
            stopped: vec![stopped],
            has_heard: true,
        }),
        (any::<i32>(), any::<bool>())
            .prop_map(|(signal, can_stop)| FromAgent::Signalled { signal: signal % 70, can_stop }),
        (prop::option::of(any::<i32>()), any::<Option<bool>>()).prop_map(|(signal, can_stop)| {
            FromAgent::StopAsked { signal: signal.map(|signal| signal % 70), can_stop }
        }),
        any::<bool>().prop_map(|reader_is_gone| FromAgent::Gone { reader_is_gone }),
        Just(FromAgent::Failed { why: "x".into() }),
    ]
}

proptest! {
    #[test]
    fn a_hostile_agent_can_only_fail_the_job(
        messages in prop::collection::vec((anything(), 0u64..400), 0..40),
    ) {
        let mut job = Job::running(3, 3, 2);
        for (message, time) in messages {
            if let Err(why) = job.coordinator.handle(1, message, job.now) {
                job.lose(1, &NodeLoss::Failed(why));
            }
            job.say(OWN, heartbeat());
            job.say(2, heartbeat());
            job.pass(Duration::from_millis(time));
        }
        // While processes run on the other nodes, nobody is told anything else.
        for (id, message) in job.sent() {
            match message {
                ToAgent::End { .. } => prop_assert!(false, "the job is over, and ranks still run"),
                ToAgent::Start(_) => prop_assert!(false, "ranks are started again, and others still run"),
                ToAgent::Do { orders } => for order in orders {
                    if let Order::Send { rank, .. } = order {
                        prop_assert_eq!(u64::from(rank / 2), id);
                    }
                },
                _ => {}
            }
        }
        // The other nodes can still end it.
        job.lose(1, &NodeLoss::Ended);
        job.end_node(2, 4..6);
        job.end_node(OWN, 0..2);
        job.say(OWN, FromAgent::Signalled { signal: Signal::SIGTERM as i32, can_stop: false });
        let (ids, outcome) = job.end();
        prop_assert_eq!(ids, [OWN, 2]);
        prop_assert_ne!(outcome.exit_code, exit_code::SUCCESS);
    }
}

//! The hub of many nodes: how many messages it needs, and for how long it computes.

use std::time::Instant;

use nix::time::{ClockId, clock_gettime};

use super::*;
use crate::nodes::Layout;
use crate::rendezvous::message::{Decoder, VERSION, encode};

const RANKS_PER_NODE: u32 = 8;

fn hub(nodes: u32) -> Hub {
    let first_ranks = (0..nodes).map(|node| node * RANKS_PER_NODE).collect();
    let layout = Layout::new(first_ranks, nodes * RANKS_PER_NODE, 0).unwrap();
    Hub::new(layout, (0..nodes).map(|node| format!("host{node}")).collect())
}

fn ready(node: u32) -> RelayMessage {
    let program = NodeProgram {
        number: 0,
        rank: node * RANKS_PER_NODE,
        path: "/home/someone/train".into(),
        digest: Some(u64::MAX),
    };
    let version = Some("570.86.15".to_owned());
    let manifest =
        NodeManifest { version: VERSION, driver: version.clone(), nccl: version, programs: vec![program] };
    RelayMessage::Ready { manifest }
}

fn failed(rank: u32) -> RankEnd {
    let message = format!("rank {rank} lost rank 7 in all_reduce 1201: rank 7 was killed by SIGKILL");
    let blame = Some(Blame { culprit: 7, timed_out: false, message });
    RankEnd { rank, end: ProcessEnd::Failed("exited with code 1".into()), blame }
}

fn finished(rank: u32) -> RankEnd {
    RankEnd { rank, end: ProcessEnd::Finished, blame: None }
}

/// Carries messages as bytes, as over a network, and counts them.
#[derive(Default)]
struct Wire {
    messages: usize,
    bytes: usize,
}

impl Wire {
    fn carry(&mut self, message: &RelayMessage) -> RelayMessage {
        let frame = encode(message);
        self.messages += 1;
        self.bytes += frame.len();
        let mut decoder = Decoder::default();
        decoder.push(&frame);
        decoder.next_message().unwrap().unwrap()
    }

    fn carry_to_hub(&mut self, hub: &mut Hub, node: u32, message: &RelayMessage) {
        let message = self.carry(message);
        let actions = hub.handle(node, message).unwrap();
        self.carry_to_nodes(actions);
    }

    fn carry_to_nodes(&mut self, actions: Vec<HubAction>) {
        for action in actions {
            if let HubAction::Send { message, .. } = action {
                self.carry(&message);
            }
        }
    }
}

/// The life of a job: all join, meet, say goodbye and finish, or fail. Returns the messages of each part.
fn life(nodes: u32, fails: bool, mut report: impl FnMut(&str, &Wire)) -> Vec<usize> {
    let (mut hub, mut counts) = (hub(nodes), Vec::new());
    let ranks_of = |node| node * RANKS_PER_NODE..(node + 1) * RANKS_PER_NODE;
    let mut part = |name: &str, run: &mut dyn FnMut(&mut Hub, &mut Wire)| {
        let mut wire = Wire::default();
        run(&mut hub, &mut wire);
        let actions = hub.flush();
        wire.carry_to_nodes(actions);
        report(name, &wire);
        counts.push(wire.messages);
    };
    part("join", &mut |hub, wire| {
        (0..nodes).for_each(|node| wire.carry_to_hub(hub, node, &ready(node)));
        assert!(hub.is_admitted());
    });
    part("barrier", &mut |hub, wire| {
        for node in 0..nodes {
            let arrived = ranks_of(node).collect();
            wire.carry_to_hub(
                hub,
                node,
                &RelayMessage::Arrived { barrier: "b".into(), ranks: None, arrived },
            );
        }
    });
    if fails {
        part("death of a rank", &mut |hub, wire| {
            let actions = hub.announce(vec![failed(nodes)]);
            wire.carry_to_nodes(actions);
        });
        part("end of the others", &mut |hub, wire| {
            for rank in (0..nodes * RANKS_PER_NODE).filter(|rank| *rank != nodes) {
                let actions = hub.announce(vec![failed(rank)]);
                wire.carry_to_nodes(actions);
            }
        });
    } else {
        part("goodbyes", &mut |hub, wire| {
            for node in 0..nodes {
                wire.carry_to_hub(hub, node, &RelayMessage::Left { ranks: ranks_of(node).collect() });
            }
        });
        part("ends", &mut |hub, wire| {
            for rank in 0..nodes * RANKS_PER_NODE {
                let actions = hub.announce(vec![finished(rank)]);
                wire.carry_to_nodes(actions);
            }
        });
    }
    counts
}

#[test]
fn messages_grow_with_the_nodes() {
    let ignore = |_: &str, _: &Wire| {};
    for nodes in [10, 100] {
        let n = nodes as usize;
        // Each node says it and is told; node 0 is told of every end by the launcher beside it.
        assert_eq!(life(nodes, false, ignore), [2 * n, 2 * n, 2 * n, n]);
        let [_, _, death, others] = life(nodes, true, ignore)[..] else { panic!("four parts") };
        assert_eq!(death, n);
        // The first failures to everyone, and its own ones to each node.
        assert!(others <= 4 * n, "{others} messages to {n} nodes");
    }
}

#[test]
fn many_failures_are_told_to_their_own_nodes_and_the_first_to_everyone() {
    let mut hub = hub(40);
    let mut told = vec![Vec::new(); 40];
    let mut actions = Vec::new();
    for rank in (0..320).rev() {
        actions.extend(hub.announce(vec![failed(rank)]));
    }
    actions.extend(hub.flush());
    for action in actions {
        let HubAction::Send { node, message: RelayMessage::Ended { ends } } = action else {
            panic!("{action:?}")
        };
        told[node as usize].extend(ends.into_iter().map(|end| end.rank));
    }
    assert_eq!(told[0], (0..320).rev().collect::<Vec<_>>());
    for (node, told) in (0..).zip(told).skip(1) {
        let first = told[..MAX_FAILURES_TOLD].iter().copied();
        assert!(first.eq((304..320).rev()), "node {node}");
        let own = node * RANKS_PER_NODE..(node + 1) * RANKS_PER_NODE;
        assert!(own.clone().all(|rank| told.contains(&rank)), "node {node}");
        assert!(told[MAX_FAILURES_TOLD..].iter().all(|rank| own.contains(rank)), "node {node}");
    }
}

#[test]
fn a_node_that_comes_late_is_told_why_the_run_does_not_start() {
    let mut hub = hub(3);
    hub.handle(0, ready(0)).unwrap();
    hub.announce(vec![failed(1), failed(2)]);
    let told = hub.handle(2, ready(2)).unwrap();
    let message = RelayMessage::Ended { ends: vec![failed(1)] };
    assert_eq!(told, [HubAction::Send { node: 2, message: message.clone() }]);
    // Also if it asks before its ranks are complete.
    let told = hub.handle(1, RelayMessage::GaveUp { missing: vec![9] }).unwrap();
    assert_eq!(told, [HubAction::Send { node: 1, message }]);
}

#[test]
fn programs_of_different_content_are_named_with_their_hosts() {
    let with = |node, path: &str, digest| {
        let RelayMessage::Ready { mut manifest } = ready(node) else { unreachable!() };
        (manifest.programs[0].path, manifest.programs[0].digest) = (path.into(), digest);
        RelayMessage::Ready { manifest }
    };
    for (path, digest, expected) in [
        (
            "/bin/train",
            Some(2),
            "rank 0 (host host0) and rank 8 (host host1) run different versions of /bin/train",
        ),
        (
            "/x/train",
            Some(2),
            "rank 0 (host host0) runs /bin/train and rank 8 (host host1) runs /x/train, with",
        ),
        // The same program elsewhere, or one that cannot be read.
        ("/x/train", Some(1), ""),
        ("/bin/train", None, ""),
    ] {
        let mut hub = hub(2);
        hub.handle(0, with(0, "/bin/train", Some(1))).unwrap();
        let actions = hub.handle(1, with(1, path, digest)).unwrap();
        match actions.last() {
            Some(HubAction::Incompatible { node: 1, fault: PreflightFault::Program, why }) => {
                assert!(!expected.is_empty() && why.starts_with(expected), "{why}");
            }
            other => assert!(expected.is_empty() && other == Some(&HubAction::Admitted), "{other:?}"),
        }
    }
}

#[test]
fn a_node_speaks_for_its_own_ranks_only() {
    let mut hub = hub(2);
    let (own, other) = ("node 1, which has ranks 8 to 15, speaks for rank 3", "which is not on another node");
    for (message, why) in [
        (RelayMessage::Left { ranks: vec![8, 3] }, own),
        (RelayMessage::Ended { ends: vec![failed(3)] }, own),
        (RelayMessage::Get { reader: 3, number: 1, key: "k".into(), from: 0 }, own),
        (RelayMessage::Get { reader: 8, number: 1, key: "k".into(), from: 9 }, other),
        (RelayMessage::Get { reader: 8, number: 1, key: "k".into(), from: 16 }, other),
        (RelayMessage::Expired { barrier: "b".into(), reader: 3 }, own),
        (RelayMessage::Arrived { barrier: "b".into(), ranks: None, arrived: vec![3] }, own),
        (
            RelayMessage::Arrived { barrier: "b".into(), ranks: Some(vec![0]), arrived: vec![8] },
            "without taking part",
        ),
        (
            RelayMessage::Arrived { barrier: "b".into(), ranks: Some(vec![16]), arrived: vec![8] },
            "rank 16 in a barrier",
        ),
        (RelayMessage::Admit, "only node 0 sends"),
    ] {
        let refusal = hub.handle(1, message).unwrap_err();
        assert!(refusal.contains(why), "{refusal}");
    }
    assert!(hub.handle(2, RelayMessage::Admit).unwrap_err().contains("node 2 in a job of 2 nodes"));
    assert!(hub.handle(1, ready(1)).unwrap().is_empty());
    assert!(hub.handle(1, ready(1)).unwrap_err().contains("node 1 was ready twice"));
}

/// Processor time of this thread, in milliseconds.
fn cpu_ms() -> f64 {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.tv_sec() as f64 * 1e3 + time.tv_nsec() as f64 / 1e6
}

/// Prints what the hub of 1,000 nodes costs, with encoding and decoding of every message.
#[test]
#[ignore = "a benchmark"]
fn a_thousand_nodes() {
    for fails in [false, true] {
        let (started, mut before) = (Instant::now(), cpu_ms());
        life(1000, fails, |name, wire| {
            let now = cpu_ms();
            eprintln!(
                "{name}: {} messages, {} bytes, {:.1} ms of CPU",
                wire.messages,
                wire.bytes,
                now - before
            );
            before = now;
        });
        eprintln!("{:.1} ms in all", started.elapsed().as_secs_f64() * 1e3);
    }
}

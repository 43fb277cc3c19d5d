//! Servers of several nodes and their hub in one process, without a network: every step is taken by the test.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::nodes::{Hub, HubAction};
use crate::rendezvous::in_process_on_nodes;
use crate::rendezvous::message::{Decoder, MAX_FRAME, MAX_VALUE, Manifest, Request};
use crate::rendezvous::preflight::Program;
use crate::rendezvous::threads::ConnectedNodes;

const RUN: &str = "a-test";
const LONG: u64 = 3_600_000;

/// The nodes of a job, and the connections of all ranks.
struct Job {
    nodes: ConnectedNodes,
    streams: Vec<UnixStream>,
    decoders: Vec<Decoder>,
}

impl Job {
    /// Nodes with these numbers of ranks, which have not said hello.
    fn new(sizes: &[u32]) -> Self {
        let first_ranks: Vec<u32> = (0..sizes.len()).map(|node| sizes[..node].iter().sum()).collect();
        let layout = |node| Layout::new(first_ranks.clone(), sizes.iter().sum(), node).unwrap();
        let parts =
            (0..sizes.len() as u32).map(|node| Server::in_process_of_node(layout(node), None, RUN).unwrap());
        let (servers, streams): (Vec<_>, Vec<_>) = parts.unzip();
        let streams: Vec<UnixStream> = streams.into_iter().flatten().collect();
        streams.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        let hosts = ["a", "b", "c", "d"].map(String::from).to_vec();
        let decoders = streams.iter().map(|_| Decoder::default()).collect();
        Job { nodes: ConnectedNodes { servers, hub: Hub::new(layout(0), hosts) }, streams, decoders }
    }

    /// The same, with all ranks admitted.
    fn admitted(sizes: &[u32]) -> Self {
        let mut job = Job::new(sizes);
        (0..job.world_size()).for_each(|rank| job.hello(rank));
        job.step();
        for rank in 0..job.world_size() {
            let Some(Reply::Welcome { layout, .. }) = job.reply(rank) else { panic!("no welcome") };
            assert!(sizes.len() == 1 || layout.unwrap().is_local(rank));
        }
        job
    }

    fn world_size(&self) -> u32 {
        self.streams.len() as u32
    }

    /// Says hello without a process that could be compared: pid 1 is not this test.
    fn hello(&mut self, rank: u32) {
        self.hello_with(rank, Manifest::default());
    }

    fn hello_with(&mut self, rank: u32, manifest: Manifest) {
        let (run_id, world_size) = (RUN.into(), self.world_size());
        self.send(rank, &Request::Hello { version: VERSION, run_id, rank, world_size, pid: 1, manifest });
    }

    fn send(&mut self, rank: u32, request: &Request) {
        (&self.streams[rank as usize]).write_all(&encode(request)).unwrap();
    }

    fn set(&mut self, rank: u32, key: &str, value: &[u8], readers: u32) {
        self.send(rank, &Request::Set { key: key.into(), value: value.into(), fds: 0, readers });
        self.step();
        assert_eq!(self.reply(rank), Some(Reply::Done));
    }

    fn get(&mut self, rank: u32, key: &str, from: u32, timeout_ms: u64) {
        self.send(rank, &Request::Get { key: key.into(), from, timeout_ms });
    }

    fn barrier(&mut self, rank: u32, name: &str, ranks: Option<&[u32]>, timeout_ms: u64) {
        let ranks = ranks.map(Vec::from);
        self.send(rank, &Request::Barrier { name: name.into(), ranks, timeout_ms });
    }

    /// Serves every node, and carries messages until there are none.
    fn step(&mut self) {
        self.nodes.servers.iter_mut().for_each(|server| drop(server.service()));
        self.nodes.carry_messages();
    }

    /// Serves the node of `rank` without carrying its messages.
    fn serve_only(&mut self, rank: u32) -> &mut Server {
        let node = self.nodes.servers[0].layout.node_of(rank);
        let server = &mut self.nodes.servers[node as usize];
        server.service();
        server
    }

    /// The next reply to `rank`, if there is one.
    fn reply(&mut self, rank: u32) -> Option<Reply> {
        let (mut stream, decoder) = (&self.streams[rank as usize], &mut self.decoders[rank as usize]);
        let mut bytes = [0; 4096];
        loop {
            if let Some(reply) = decoder.next_message().unwrap() {
                return Some(reply);
            }
            match stream.read(&mut bytes) {
                Ok(0) => panic!("the server of rank {rank} has closed its connection"),
                Ok(count) => decoder.push(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn replies(&mut self) -> Vec<Option<Reply>> {
        (0..self.world_size()).map(|rank| self.reply(rank)).collect()
    }

    /// The launcher announces how a rank ended.
    fn announce(&mut self, rank: u32, how: &str, blame: Option<Blame>) {
        let end = RankEnd { rank, end: ProcessEnd::Failed(how.into()), blame };
        let actions = self.nodes.hub.announce(vec![end]);
        actions.into_iter().for_each(|action| self.nodes.apply(action));
        self.nodes.carry_messages();
    }
}

fn value(text: &[u8]) -> Option<Reply> {
    Some(Reply::Value { value: text.into(), fds: 0 })
}

#[test]
fn a_value_is_read_on_other_nodes_in_both_orders_and_as_often_as_announced() {
    let mut job = Job::admitted(&[2, 2, 1]);
    job.get(4, "early", 1, LONG);
    job.step();
    assert_eq!(job.reply(4), None);
    job.set(1, "early", b"one", 1);
    assert_eq!(job.reply(4), value(b"one"));

    // Read on the same node and on two others, and gone after that.
    job.set(0, "late", b"two", 3);
    for rank in [1, 2, 4] {
        job.get(rank, "late", 0, LONG);
        job.step();
        assert_eq!(job.reply(rank), value(b"two"), "rank {rank}");
    }
    job.get(3, "late", 0, 0);
    job.step();
    assert_eq!(job.reply(3), Some(Reply::TimedOut { missing: vec![0] }));
    job.set(0, "late", b"three", 1);
    job.get(3, "late", 0, LONG);
    job.step();
    assert_eq!(job.reply(3), value(b"three"));
    assert!(job.nodes.servers.iter().all(|server| server.outbox.is_empty()));
}

#[test]
fn a_value_that_arrives_after_its_reader_stopped_waiting_is_not_lost() {
    let mut job = Job::admitted(&[1, 1]);
    // The wait ends before the owner's node hears of it.
    job.get(1, "key", 0, 0);
    job.serve_only(1);
    assert_eq!(job.reply(1), Some(Reply::TimedOut { missing: vec![0] }));
    let asked = job.nodes.servers[1].take_outbox();
    assert!(matches!(asked[..], [RelayMessage::Get { .. }, RelayMessage::Cancelled { .. }]), "{asked:?}");
    job.set(0, "key", b"value", 1);
    asked.into_iter().for_each(|message| job.nodes.servers[0].deliver(message).unwrap());
    // The value was read there, and a second wait begins before it arrives.
    job.get(1, "key", 0, LONG);
    job.serve_only(1);
    job.step();
    assert_eq!(job.reply(1), value(b"value"));

    // It arrives between two waits.
    job.get(1, "key", 0, 0);
    job.serve_only(1);
    assert_eq!(job.reply(1), Some(Reply::TimedOut { missing: vec![0] }));
    let asked = job.nodes.servers[1].take_outbox();
    job.set(0, "key", b"again", 1);
    asked.into_iter().for_each(|message| job.nodes.servers[0].deliver(message).unwrap());
    job.step();
    assert_eq!(job.reply(1), None);
    job.get(1, "key", 0, 0);
    job.step();
    assert_eq!(job.reply(1), value(b"again"));
    // No wait is left on the other node that would read a later value.
    job.set(0, "key", b"third", 1);
    job.get(1, "key", 0, LONG);
    job.step();
    assert_eq!(job.reply(1), value(b"third"));
}

#[test]
fn descriptors_stay_on_their_node() {
    let ranks = in_process_on_nodes(&[0, 2], 3, RUN).unwrap();
    let stores: Vec<_> = ranks.iter().map(|(store, _)| store).collect();
    let layout = stores[2].layout().unwrap();
    assert_eq!((layout.nodes(), layout.local_ranks()), (2, 2..3));
    assert_eq!(stores[2].address().unwrap().to_string(), "127.0.0.1");
    let file = std::fs::File::open("/dev/null").unwrap();
    stores[0].set("memory", b"m", &[file.as_fd()], 1).unwrap();
    let patience = Duration::from_secs(60);
    let denied = stores[2].get("memory", 0, patience).unwrap_err().to_string();
    assert!(
        denied.contains("key `memory` of rank 0 (node 0) has descriptors, which rank 2 (node 1)"),
        "{denied}"
    );
    // That was no read.
    assert_eq!(stores[1].get("memory", 0, patience).unwrap().1.len(), 1);
}

#[test]
fn a_barrier_opens_when_its_participants_of_all_nodes_have_arrived() {
    let mut job = Job::admitted(&[2, 1, 2]);
    for round in 0..3 {
        for rank in [4, 0, 2, 1] {
            job.barrier(rank, "all", None, LONG);
            job.step();
        }
        assert_eq!(job.replies(), vec![None; 5], "round {round}");
        job.barrier(3, "all", None, LONG);
        job.step();
        assert_eq!(job.replies(), vec![Some(Reply::Done); 5], "round {round}");
    }
    // Subsets on several nodes and on one, at the same time; the order of the participants does not matter.
    job.barrier(0, "some", Some(&[4, 0]), LONG);
    job.barrier(1, "others", Some(&[1, 2]), LONG);
    job.barrier(3, "own", Some(&[3]), LONG);
    job.step();
    assert_eq!(job.replies(), [None, None, None, Some(Reply::Done), None]);
    job.barrier(4, "some", Some(&[0, 4]), LONG);
    job.step();
    assert_eq!(job.replies(), [Some(Reply::Done), None, None, None, Some(Reply::Done)]);
    job.barrier(2, "others", Some(&[2, 1]), LONG);
    job.step();
    assert_eq!(job.replies(), [None, Some(Reply::Done), Some(Reply::Done), None, None]);
}

#[test]
fn an_arrival_is_one_message_for_all_ranks_of_a_node() {
    let mut job = Job::admitted(&[3, 1]);
    (0..3).for_each(|rank| job.barrier(rank, "b", None, LONG));
    let outbox = job.serve_only(0).take_outbox();
    let arrived = RelayMessage::Arrived { barrier: "b".into(), ranks: None, arrived: vec![0, 1, 2] };
    assert_eq!(outbox, [arrived]);
}

#[test]
fn a_deadline_names_the_missing_ranks_of_all_nodes() {
    let mut job = Job::admitted(&[2, 2]);
    job.get(0, "key", 3, 0);
    job.barrier(1, "b", None, LONG);
    job.step();
    assert_eq!(job.reply(0), Some(Reply::TimedOut { missing: vec![3] }));
    // Two ranks of different nodes whose deadlines pass in the same barrier have both arrived.
    job.barrier(0, "b", None, 0);
    job.barrier(2, "b", None, 0);
    let outboxes = [0, 2].map(|rank| job.serve_only(rank).take_outbox());
    let (mut arrived, mut expired) = (Vec::new(), Vec::new());
    for (node, outbox) in (0..).zip(outboxes) {
        let [first, second] = <[RelayMessage; 2]>::try_from(outbox).unwrap();
        arrived.push((node, first));
        expired.push((node, second));
    }
    for (node, message) in arrived.into_iter().chain(expired) {
        let actions = job.nodes.hub.handle(node, message).unwrap();
        actions.into_iter().for_each(|action| job.nodes.apply(action));
    }
    let missing = Some(Reply::TimedOut { missing: vec![3] });
    assert_eq!(job.replies(), [missing.clone(), None, missing, None]);
    // The others wait until they all come back.
    job.barrier(3, "b", None, LONG);
    job.step();
    assert_eq!(job.replies(), vec![None; 4]);
    job.barrier(0, "b", None, LONG);
    job.barrier(2, "b", None, LONG);
    job.step();
    assert_eq!(job.replies(), vec![Some(Reply::Done); 4]);
}

#[test]
fn a_barrier_that_completes_as_its_deadline_passes_opens() {
    let mut job = Job::admitted(&[1, 1]);
    job.barrier(0, "b", None, LONG);
    job.step();
    job.barrier(1, "b", None, 0);
    let outbox = job.serve_only(1).take_outbox();
    assert!(matches!(outbox[..], [RelayMessage::Arrived { .. }, RelayMessage::Expired { .. }]), "{outbox:?}");
    for message in outbox {
        let actions = job.nodes.hub.handle(1, message).unwrap();
        actions.into_iter().for_each(|action| job.nodes.apply(action));
    }
    assert_eq!(job.replies(), vec![Some(Reply::Done); 2]);
}

#[test]
fn different_participants_of_one_barrier_are_named() {
    let mut job = Job::admitted(&[2, 1]);
    job.barrier(0, "b", Some(&[0, 2]), LONG);
    job.step();
    job.barrier(2, "b", Some(&[1, 2]), LONG);
    job.step();
    let Some(Reply::Denied { why }) = job.reply(2) else { panic!("no denial") };
    assert_eq!(why, "rank 2 and rank 0 are in barrier `b` with different participants");
    job.barrier(2, "b", Some(&[0, 2]), LONG);
    job.step();
    assert_eq!(job.replies(), [Some(Reply::Done), None, Some(Reply::Done)]);
}

#[test]
fn a_rank_that_leaves_ends_the_waits_that_need_it_on_all_nodes() {
    let mut job = Job::admitted(&[2, 2]);
    job.set(1, "legacy", b"kept", 1);
    job.get(2, "never", 1, LONG);
    job.barrier(3, "b", None, LONG);
    job.barrier(0, "without", Some(&[0, 2]), LONG);
    job.step();
    job.send(1, &Request::Leave);
    job.step();
    let gone = Some(Reply::PeerGone { peer: 1, how: "left the run".into() });
    assert_eq!(job.replies(), [None, Some(Reply::Done), gone.clone(), gone.clone()]);
    assert!(job.nodes.servers.iter().all(|server| server.page.state(1) == RankState::Left));
    // What it has set can still be read, and others go on without it.
    job.get(3, "legacy", 1, LONG);
    job.get(2, "never", 1, LONG);
    job.step();
    assert_eq!((job.reply(3), job.reply(2)), (value(b"kept"), gone.clone()));
    job.barrier(3, "b", None, LONG);
    job.barrier(2, "without", Some(&[0, 2]), LONG);
    job.step();
    assert_eq!(job.replies(), [Some(Reply::Done), None, Some(Reply::Done), gone]);
}

#[test]
fn a_rank_that_fails_ends_all_waits_on_all_nodes() {
    let mut job = Job::admitted(&[2, 2, 1]);
    job.get(0, "key", 3, LONG);
    job.barrier(1, "b", Some(&[1, 3]), LONG);
    job.get(2, "key", 0, LONG);
    job.barrier(3, "b", Some(&[1, 3, 2]), LONG);
    job.step();
    let message = "rank 4 lost rank 3".to_owned();
    job.announce(4, "was killed by SIGKILL", Some(Blame { culprit: 3, timed_out: true, message }));
    let gone = Some(Reply::PeerGone { peer: 4, how: "was killed by SIGKILL".into() });
    // The barrier with other participants had been denied before.
    assert!(matches!(job.reply(3), Some(Reply::Denied { .. })));
    assert_eq!([0, 1, 2].map(|rank| job.reply(rank)), [gone.clone(), gone.clone(), gone.clone()]);
    for server in &job.nodes.servers {
        assert_eq!((server.page.first_failed(), server.page.state(4)), (Some(4), RankState::Failed));
        assert_eq!(server.page.blame_of(4).map(|blame| (blame.culprit, blame.timed_out)), Some((3, true)));
    }
    job.get(0, "key", 3, LONG);
    job.barrier(2, "b", None, LONG);
    job.step();
    assert_eq!([0, 2].map(|rank| job.reply(rank)), [gone.clone(), gone]);
}

#[test]
fn a_rank_that_panics_is_a_failure_on_all_nodes() {
    let mut job = Job::admitted(&[1, 1]);
    job.barrier(0, "b", None, LONG);
    job.step();
    // What the runtime of a rank does.
    let page = &job.nodes.servers[1].page;
    page.blame(1, &Blame { culprit: 1, timed_out: false, message: "its own fault".into() });
    page.record_end(1, Ending::Failed("panicked"));
    job.send(1, &Request::Leave);
    job.step();
    assert_eq!(job.reply(0), Some(Reply::PeerGone { peer: 1, how: "panicked".into() }));
    assert_eq!(job.nodes.servers[0].page.blame_of(1).unwrap().message, "its own fault");
    // Its process ends after that; its first words are kept.
    job.announce(1, "exited with code 101", None);
    assert_eq!(job.nodes.servers[0].page.end_description(1), "panicked");
}

#[test]
fn a_rank_that_ends_before_all_have_joined_is_told_to_all_nodes() {
    let mut job = Job::new(&[2, 1, 1]);
    [0, 1, 3].into_iter().for_each(|rank| job.hello(rank));
    job.step();
    assert_eq!(job.replies(), vec![None; 4]);
    job.announce(2, "exited with code 3", None);
    let gone = Some(Reply::PeerGone { peer: 2, how: "exited with code 3".into() });
    assert_eq!(job.replies(), [gone.clone(), gone.clone(), None, gone]);
    // The server has recorded their blame, because they have no progress page.
    assert_eq!(job.nodes.servers[0].blame(1).map(|blame| blame.culprit), Some(2));
    assert!(!job.nodes.hub.is_admitted());
}

#[test]
fn an_admission_that_crosses_the_end_of_a_rank_admits_nobody_there() {
    let mut job = Job::new(&[1, 1]);
    (0..2).for_each(|rank| job.hello(rank));
    let ready: Vec<_> =
        (0..2).map(|rank| job.serve_only(rank).take_outbox()).map(|mut outbox| outbox.remove(0)).collect();
    let mut actions = Vec::new();
    for (node, message) in (0..).zip(ready) {
        actions.extend(job.nodes.hub.handle(node, message).unwrap());
    }
    // Node 1 sees the end of its rank first.
    job.nodes.servers[1].local_rank_ended(1, ProcessEnd::Failed("ended without a goodbye".into()));
    actions.into_iter().for_each(|action| job.nodes.apply(action));
    assert_eq!(
        (job.reply(0), job.reply(1)),
        (
            Some(Reply::Welcome {
                layout: Some(job.nodes.servers[0].layout.clone()),
                address: None,
                nccl: None
            }),
            None
        )
    );
    job.step();
    job.get(0, "key", 1, LONG);
    job.step();
    assert!(matches!(job.reply(0), Some(Reply::PeerGone { peer: 1, .. })));
}

#[test]
fn incompatible_nodes_are_named_with_both_values() {
    let manifest = |driver: &str, nccl: &str| {
        let version = |text: &str| Some(text.to_owned());
        Manifest { gpu: version("GPU-aa"), driver: version(driver), nccl: version(nccl), shares_gpu: false }
    };
    for (other, expected) in [
        (manifest("571", "2.27"), "rank 0 (host a) uses NVIDIA driver 570 and rank 1 (host b) 571: install"),
        (
            manifest("570", "2.28"),
            "rank 0 (host a) uses NCCL 2.27 and rank 1 (host b) 2.28: check LD_LIBRARY",
        ),
        (Manifest::default(), "rank 0 (host a) uses NVIDIA driver 570 and rank 1 (host b) none: install"),
    ] {
        let mut job = Job::new(&[1, 1]);
        job.hello_with(0, manifest("570", "2.27"));
        job.step();
        job.hello_with(1, other);
        let ready = job.serve_only(1).take_outbox().remove(0);
        let actions = job.nodes.hub.handle(1, ready).unwrap();
        let Some(HubAction::Incompatible { node: 1, fault: PreflightFault::Versions, why }) = actions.last()
        else {
            panic!("{actions:?}")
        };
        assert!(why.starts_with(expected), "{why}");
        actions.into_iter().for_each(|action| job.nodes.apply(action));
        let Some(Reply::Refused { why }) = job.reply(1) else { panic!("no refusal") };
        assert!(why.starts_with(expected), "{why}");
    }
    // Different hosts may have GPUs that call themselves the same.
    let mut job = Job::new(&[1, 1]);
    (0..2).for_each(|rank| job.hello_with(rank, manifest("570", "2.27")));
    job.step();
    assert!(matches!(job.reply(1), Some(Reply::Welcome { .. })));
}

#[test]
fn a_hello_of_another_node_is_refused() {
    let mut job = Job::new(&[2, 2]);
    let request = Request::Hello {
        version: VERSION,
        run_id: RUN.into(),
        rank: 3,
        world_size: 4,
        pid: 1,
        manifest: Manifest::default(),
    };
    job.send(0, &request);
    job.serve_only(0);
    let Some(Reply::Refused { why }) = job.reply(0) else { panic!("no refusal") };
    assert!(why.starts_with("a process claims to be rank 3 on node 0, which has ranks 0 to 1"), "{why}");
}

/// Nodes of ranks that no launcher supervises.
fn unattended(sizes: &[u32], join_by: Instant) -> Job {
    let mut job = Job::new(sizes);
    for server in &mut job.nodes.servers {
        (server.unattended, server.join_by) = (true, Some(join_by));
    }
    job
}

#[test]
fn without_a_launcher_the_end_of_a_connection_is_told_to_all_nodes() {
    let mut job = unattended(&[2, 2], Instant::now() + Duration::from_secs(3600));
    (0..4).for_each(|rank| job.hello(rank));
    job.step();
    (0..4).for_each(|rank| assert!(matches!(job.reply(rank), Some(Reply::Welcome { .. }))));
    job.barrier(0, "b", None, LONG);
    job.get(2, "key", 3, LONG);
    job.step();
    job.streams[3].shutdown(std::net::Shutdown::Both).unwrap();
    job.step();
    let gone = Some(Reply::PeerGone { peer: 3, how: "ended without a goodbye".into() });
    assert_eq!([0, 2].map(|rank| job.reply(rank)), [gone.clone(), gone]);
    assert!(job.nodes.servers.iter().all(|server| server.page.first_failed() == Some(3)));
}

#[test]
fn without_a_launcher_the_missing_ranks_of_all_nodes_are_named() {
    let mut job = unattended(&[2, 2, 2], Instant::now() + Duration::from_secs(3600));
    [0, 1, 3].into_iter().for_each(|rank| job.hello(rank));
    job.step();
    assert_eq!(job.replies(), vec![None; 6]);
    job.nodes.servers[0].join_by = Some(Instant::now());
    job.step();
    let missing = Some(Reply::TimedOut { missing: vec![2, 4, 5] });
    assert_eq!([0, 1, 3].map(|rank| job.reply(rank)), [missing.clone(), missing.clone(), missing.clone()]);
    // A node whose own time passes later is told the same.
    let given_up = job.nodes.hub.handle(2, RelayMessage::GaveUp { missing: vec![4, 5] }).unwrap();
    let message = RelayMessage::GaveUp { missing: vec![2, 4, 5] };
    assert_eq!(given_up, [HubAction::Send { node: 2, message }]);
}

#[test]
fn without_a_launcher_a_refused_rank_is_told_to_all_nodes() {
    let mut job = unattended(&[2, 1], Instant::now() + Duration::from_secs(3600));
    let driver = |version: &str| Manifest { driver: Some(version.into()), ..Manifest::default() };
    job.hello_with(2, driver("570"));
    job.step();
    (0..2).for_each(|rank| job.hello_with(rank, driver("571")));
    job.step();
    let Some(Reply::Refused { why }) = job.reply(0) else { panic!("no refusal") };
    assert!(why.starts_with("rank 2 (host b) uses NVIDIA driver 570 and rank 0 (host a) 571"), "{why}");
    let gone = Some(Reply::PeerGone { peer: 0, how: format!("was refused: {why}") });
    assert_eq!([1, 2].map(|rank| job.reply(rank)), [gone.clone(), gone]);
}

/// Programs are compared by content between nodes.
#[test]
fn the_manifest_of_a_node_has_a_digest_of_its_program() {
    let mut job = Job::new(&[2, 1]);
    (0..2).for_each(|rank| job.hello(rank));
    let outbox = job.serve_only(0).take_outbox();
    let [RelayMessage::Ready { manifest }] = &outbox[..] else { panic!("{outbox:?}") };
    let own = Program::of(std::process::id()).unwrap();
    let expected = NodeProgram { number: 0, rank: 0, path: own.to_string(), digest: own.hash().ok() };
    assert_eq!((manifest.version, &manifest.programs[..]), (VERSION, &[expected][..]));
    assert!(manifest.programs[0].digest.is_some());
}

#[test]
fn threads_on_several_nodes_exchange_values_and_meet() {
    let first_ranks = [0, 1, 4];
    let ranks = in_process_on_nodes(&first_ranks, 6, RUN).unwrap();
    let patience = Duration::from_secs(60);
    std::thread::scope(|scope| {
        for ((store, page), rank) in ranks.iter().zip(0..6u32) {
            scope.spawn(move || {
                assert_eq!(page.world_size(), 6);
                for round in 0..50 {
                    let key = |rank| format!("{round}/{rank}");
                    store.set(&key(rank), &rank.to_le_bytes(), &[], 6).unwrap();
                    for from in 0..6u32 {
                        assert_eq!(store.get(&key(from), from, patience).unwrap().0, from.to_le_bytes());
                    }
                    store.barrier("round", patience).unwrap();
                }
                store.leave();
            });
        }
    });
    let (late, _) = &ranks[5];
    assert!(late.get("0/0", 0, patience).is_err(), "rank 0 has left");
}

/// Ranks may send what they like: the messages that their server makes of it fit frames.
#[test]
fn the_largest_messages_of_a_server_fit_a_frame() {
    let mut job = Job::new(&[1, 1]);
    let (name, text) = ("\u{1}".repeat(256), Some("\u{1}".repeat(4000)));
    let manifest = Manifest { driver: text.clone(), nccl: text, ..Manifest::default() };
    let hello = [0, 1].map(|rank| {
        job.hello_with(rank, manifest.clone());
        job.serve_only(rank).take_outbox().remove(0)
    });
    assert!(encode(&hello[0]).len() < MAX_FRAME / 2);
    for (node, ready) in (0..).zip(hello) {
        let actions = job.nodes.hub.handle(node, ready).unwrap();
        actions.into_iter().for_each(|action| job.nodes.apply(action));
    }
    assert!(matches!(job.reply(0), Some(Reply::Welcome { .. })));
    // A list of participants that repeats them.
    let again: Vec<u32> = (0..30_000).map(|number| number % 2).collect();
    job.barrier(0, &name, Some(&again), 0);
    let value = vec![255; MAX_VALUE];
    job.send(1, &Request::Set { key: name.clone(), value, fds: 0, readers: 1 });
    job.serve_only(1);
    job.nodes.servers[1]
        .deliver(RelayMessage::Get { reader: 0, number: u64::MAX, key: name, from: 1 })
        .unwrap();
    for rank in [0, 1] {
        let outbox = job.serve_only(rank).take_outbox();
        assert!(!outbox.is_empty());
        outbox.iter().for_each(|message| assert!(encode(message).len() < MAX_FRAME - 1024));
    }
}

/// Messages of a hub that obeys no rules.
fn message(world_size: u32) -> impl Strategy<Value = RelayMessage> {
    let rank = || prop_oneof![8 => 0..world_size, 1 => Just(world_size), 1 => Just(u32::MAX)];
    let name = || prop_oneof!["a", "b", Just("n".repeat(300))];
    let ranks = move || prop::collection::vec(rank(), 0..4);
    let reply = prop_oneof![
        Just(Reply::Done),
        (0..3u32).prop_map(|fds| Reply::Value { value: vec![7], fds }),
        ranks().prop_map(|missing| Reply::TimedOut { missing }),
        rank().prop_map(|peer| Reply::PeerGone { peer, how: "\u{1}".repeat(12_000) }),
        Just(Reply::Denied { why: "\u{1}".repeat(12_000) }),
    ];
    let reply = reply.boxed();
    let end = (rank(), any::<bool>(), prop::option::of(rank())).prop_map(|(rank, failed, culprit)| RankEnd {
        rank,
        end: if failed { ProcessEnd::Failed("x".repeat(1000)) } else { ProcessEnd::Finished },
        blame: culprit.map(|culprit| Blame { culprit, timed_out: false, message: "\u{1}".repeat(1000) }),
    });
    prop_oneof![
        Just(RelayMessage::Admit),
        rank().prop_map(|rank| RelayMessage::Refused { rank, why: "why".repeat(1000) }),
        ranks().prop_map(|missing| RelayMessage::GaveUp { missing }),
        ranks().prop_map(|ranks| RelayMessage::Joined { ranks }),
        (rank(), 0..3u64, name(), rank()).prop_map(|(reader, number, key, from)| RelayMessage::Get {
            reader,
            number,
            key,
            from
        }),
        (rank(), 0..3u64, name(), rank()).prop_map(|(reader, number, key, from)| RelayMessage::Cancelled {
            reader,
            number,
            key,
            from
        }),
        (rank(), 0..3u64, name(), reply.clone()).prop_map(|(reader, number, key, reply)| RelayMessage::Got {
            reader,
            number,
            key,
            reply
        }),
        (rank(), name(), reply).prop_map(|(reader, barrier, reply)| RelayMessage::NotReleased {
            reader,
            barrier,
            reply
        }),
        (name(), prop::option::of(ranks()), ranks())
            .prop_map(|(barrier, ranks, arrived)| RelayMessage::Arrived { barrier, ranks, arrived }),
        name().prop_map(|barrier| RelayMessage::Released { barrier }),
        (name(), rank()).prop_map(|(barrier, reader)| RelayMessage::Expired { barrier, reader }),
        ranks().prop_map(|ranks| RelayMessage::Left { ranks }),
        ranks().prop_map(|ranks| RelayMessage::Finished { ranks }),
        prop::collection::vec(end, 0..3).prop_map(|ends| RelayMessage::Ended { ends }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Arbitrary messages between requests of ranks: nothing panics, and every message that a server makes fits a frame.
    #[test]
    fn a_hub_without_rules_never_panics_a_server(messages in prop::collection::vec(message(4), 0..40), admitted: bool) {
        let mut job = if admitted { Job::admitted(&[2, 2]) } else { Job::new(&[2, 2]) };
        for (number, message) in messages.into_iter().enumerate() {
            match number {
                1 if !admitted => job.hello(0),
                2 if admitted => job.get(0, "a", 2, LONG),
                3 if admitted => job.barrier(1, "b", None, LONG),
                _ => {}
            }
            let server = &mut job.nodes.servers[0];
            let _ = server.deliver(message);
            server.service();
            for message in server.take_outbox() {
                prop_assert!(encode(&message).len() <= MAX_FRAME);
            }
        }
    }

    /// Nodes that obey no rules: the hub never panics, what it keeps is bounded, and the servers of other nodes accept what
    /// it makes of their messages.
    #[test]
    fn nodes_without_rules_never_harm_others(messages in prop::collection::vec((0..4u32, message(6)), 0..80)) {
        let mut job = Job::admitted(&[2, 2, 2]);
        for (from, message) in messages {
            let is_answer = matches!(message, RelayMessage::Got { .. });
            let actions = job.nodes.hub.handle(from, message).unwrap_or_default();
            for action in actions.into_iter().chain(job.nodes.hub.flush()) {
                let HubAction::Send { node, message } = action else { continue };
                prop_assert!(is_answer || encode(&message).len() <= MAX_FRAME);
                let accepted = job.nodes.servers[node as usize].deliver(message.clone());
                prop_assert!(accepted.is_ok(), "{accepted:?} of {message:?}");
            }
            prop_assert!(job.nodes.hub.places() <= 6 * 6);
        }
    }
}

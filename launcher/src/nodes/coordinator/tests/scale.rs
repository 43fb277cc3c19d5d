//! What a job of 1,000 nodes costs node 0: first the coordinator alone, with the handshakes and the encoding of every
//! message, then a real one with as many connections over loopback.
//!
//! Benchmarks: `cargo test --release -p mgpurun --lib thousand -- --ignored --nocapture` prints their results as JSON.

use mgpu_control::nodes::channel::Channel;
use mgpu_control::nodes::handshake::Handshake;
use mgpu_control::nodes::{
    Credentials, Dialer, Endpoint, Link, LinkState, NodeManifest, RelayMessage, RunTag, Secret,
};
use mgpu_control::progress::{LastOperation, Operation};
use nix::poll::{PollFd, PollTimeout, poll};
use nix::time::{ClockId, clock_gettime};

use super::*;

const AGENTS: u32 = 999;
const RANKS: u32 = 8;

/// Processor time of this thread in seconds.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn credentials() -> Credentials {
    Credentials::Secret(Secret::new(b"a secret of the benchmark", "test").unwrap())
}

fn handshake() -> (Channel, Channel) {
    let (credentials, run) = (credentials(), RunTag::of("run"));
    let mut agent = Handshake::dialer(&credentials, run).unwrap();
    let mut coordinator = Handshake::listener(&credentials, run).unwrap();
    let (mut one, mut other) = (None, None);
    while one.is_none() || other.is_none() {
        other = other.or(coordinator.advance(&agent.take_output()).unwrap());
        one = one.or(agent.advance(&coordinator.take_output()).unwrap());
    }
    (one.unwrap(), other.unwrap())
}

/// An agent, with both ends of its connection.
struct Agent {
    near: Channel,
    far: Channel,
}

/// What was sent in a part of the job.
#[derive(Default)]
struct Cost {
    cpu: f64,
    messages: usize,
    to_nodes: usize,
    from_nodes: usize,
}

impl Cost {
    fn json(&self) -> serde_json::Value {
        let Cost { cpu, messages, to_nodes, from_nodes } = self;
        serde_json::json!({
            "cpu_seconds": (cpu * 1e4).round() / 1e4,
            "messages_to_nodes": messages,
            "bytes_to_a_node": to_nodes / AGENTS as usize,
            "bytes_from_a_node": from_nodes / AGENTS as usize,
        })
    }
}

struct Swarm {
    coordinator: Coordinator,
    agents: Vec<Agent>,
    now: Instant,
    cost: Cost,
}

impl Swarm {
    /// An agent's message as bytes, which the coordinator reads. Only the coordinator's time counts.
    fn say(&mut self, id: u32, message: &FromAgent) {
        let agent = &mut self.agents[id as usize - 1];
        let mut bytes = Vec::new();
        agent.far.seal(message, &mut bytes).unwrap();
        self.cost.from_nodes += bytes.len();
        let before = cpu();
        agent.near.open(&bytes).unwrap();
        while let Some(message) = agent.near.next_message().unwrap() {
            self.coordinator.handle(id.into(), message, self.now).unwrap();
        }
        self.cost.cpu += cpu() - before;
    }

    /// Sends what the coordinator has decided. Returns what agents are told.
    fn flush(&mut self) -> Vec<ToAgent> {
        let mut told = Vec::new();
        let before = cpu();
        self.coordinator.tick(self.now);
        for (id, message) in self.coordinator.take_outbox() {
            if id != OWN {
                let mut bytes = Vec::new();
                let agent = &mut self.agents[id as usize - 1];
                agent.near.seal(&message, &mut bytes).unwrap();
                self.cost.to_nodes += bytes.len();
                self.cost.messages += 1;
                told.push((id, bytes));
            }
        }
        self.cost.cpu += cpu() - before;
        let read = told.into_iter().flat_map(|(id, bytes)| {
            let far = &mut self.agents[id as usize - 1].far;
            far.open(&bytes).unwrap();
            std::iter::from_fn(|| far.next_message().unwrap()).collect::<Vec<ToAgent>>()
        });
        read.collect()
    }

    fn take_cost(&mut self) -> serde_json::Value {
        std::mem::take(&mut self.cost).json()
    }
}

fn ranks_of(node: u32) -> Range<u32> {
    node * RANKS..(node + 1) * RANKS
}

#[test]
#[ignore = "a benchmark"]
fn a_thousand_agents() {
    let config = Config { nodes: AGENTS + 1..=AGENTS + 1, ..Job::new(2, 2, 0).coordinator.config };
    let own = NodeCard { ranks: RANKS, nodes: (AGENTS + 1, AGENTS + 1), ..card("node0000", Some(0)) };
    let now = Instant::now();
    let coordinator = Coordinator::new(config, own.clone(), now);
    let mut swarm = Swarm { coordinator, agents: Vec::new(), now, cost: Cost::default() };
    let memory = resident();

    // Handshakes of both sides.
    let before = cpu();
    for id in 1..=AGENTS {
        let (far, near) = handshake();
        swarm.agents.push(Agent { near, far });
        swarm.coordinator.connected(id.into(), None, now);
    }
    let handshakes = cpu() - before;
    for id in 1..=AGENTS {
        let card = NodeCard { host: format!("node{id:04}"), node_rank: Some(id), ..own.clone() };
        swarm.say(id, &FromAgent::Join(Box::new(card)));
    }
    let starts = swarm.flush().iter().filter(|message| matches!(message, ToAgent::Start(_))).count();
    assert_eq!(starts, AGENTS as usize);
    let in_all = handshakes + swarm.cost.cpu;
    let joins = swarm.take_cost();

    // All ranks say hello, and are admitted.
    let manifest = NodeManifest { version: 1, driver: None, nccl: None, programs: Vec::new() };
    let ready = FromAgent::Relay { messages: vec![RelayMessage::Ready { manifest }] };
    swarm.coordinator.handle(OWN, ready.clone(), now).unwrap();
    for id in 1..=AGENTS {
        ranks_of(id).for_each(|rank| swarm.say(id, &FromAgent::Joined { rank }));
        swarm.say(id, &ready);
    }
    assert_eq!(swarm.flush().len(), AGENTS as usize);
    let admission = swarm.take_cost();

    // Ten seconds of training.
    for second in 1..=10 {
        swarm.now += HEARTBEAT;
        for id in 1..=AGENTS {
            let entries = ranks_of(id).map(|rank| (rank, busy_entry(second))).collect();
            swarm.say(id, &FromAgent::Progress { entries, stopped: Vec::new(), has_heard: true });
        }
        assert_eq!(swarm.flush().len(), AGENTS as usize);
    }
    let percent = swarm.cost.cpu / 10.0 * 100.0;
    let heartbeats = swarm.take_cost();

    // A rank fails: all are told, and are asked to end.
    let exit = |rank, code| FromAgent::Exited {
        rank,
        exit: Exit::Code(code),
        blame: None,
        last_lines: vec!["a line that says why".into(); MAX_LAST_LINES],
    };
    swarm.say(500, &exit(4000, 3));
    let told = swarm.flush();
    assert_eq!(told.len(), AGENTS as usize);
    swarm.now += ERROR_TIME;
    swarm.flush();
    let death = swarm.take_cost();
    for rank in 0..RANKS {
        swarm.coordinator.handle(OWN, exit(rank, 143), swarm.now).unwrap();
    }
    for id in 1..=AGENTS {
        ranks_of(id).filter(|rank| *rank != 4000).for_each(|rank| swarm.say(id, &exit(rank, 143)));
        swarm.now += Duration::from_millis(1);
        swarm.flush();
    }
    let gone = FromAgent::Gone { reader_is_gone: false };
    swarm.coordinator.handle(OWN, gone.clone(), swarm.now).unwrap();
    (1..=AGENTS).for_each(|id| swarm.say(id, &gone));
    let ends = swarm.flush().iter().filter(|message| matches!(message, ToAgent::End { .. })).count();
    assert_eq!(ends, AGENTS as usize);
    let result = serde_json::json!({
        "agents": AGENTS + 1,
        "ranks_per_agent": RANKS,
        "handshakes_cpu_seconds": (handshakes * 1e4).round() / 1e4,
        "joins": joins,
        "joins_and_handshakes_cpu_seconds": (in_all * 1e4).round() / 1e4,
        "admission": admission,
        "ten_seconds_of_heartbeats": heartbeats,
        "heartbeats_percent_of_a_core": (percent * 100.0).round() / 100.0,
        "a_death_until_sigterm": death,
        "the_end": swarm.take_cost(),
        "resident_bytes_for_a_node": (resident().saturating_sub(memory)) / AGENTS as usize,
    });
    println!("{result}");
}

fn busy_entry(step: u64) -> ProgressEntry {
    let operation = LastOperation {
        operation: Operation::AllReduce,
        sequence: step * 100,
        bytes: 1 << 20,
        running: true,
        waits_for: Some(7),
    };
    ProgressEntry { operation: Some(operation), ..entry(step) }
}

/// Joins the `mgpurun` that listens at `MGPU_SWARM` (address and port), as 999 agents whose ranks do nothing, and stays
/// for 20 s of heartbeats; whoever started that one measures it:
///
/// `MGPU_SECRET="a secret of the benchmark" mgpurun --nnodes 1000 --node-rank 0 --rdzv-endpoint 127.0.0.1:29400 -n 1 sleep 30`
#[test]
#[ignore = "a benchmark"]
fn a_thousand_links() {
    let Ok(endpoint) = std::env::var("MGPU_SWARM") else { return };
    let endpoint: Endpoint = endpoint.parse().unwrap();
    let credentials = Credentials::Secret(Secret::new(b"a secret of the benchmark", "test").unwrap());
    let started = Instant::now();
    let mut links: Vec<Link> = (1..=AGENTS).map(|id| connect(&endpoint, &credentials, id)).collect();
    let joined = started.elapsed();
    let mut starts = 0;
    let until = Instant::now() + Duration::from_secs(20);
    // Each agent has its own millisecond of every second.
    let mut next: u64 = 0;
    let begin = Instant::now();
    while Instant::now() < until {
        let due = begin + Duration::from_millis(next);
        let left = due.saturating_duration_since(Instant::now()).as_millis() as u16;
        let ready: Vec<bool> = {
            let mut fds: Vec<PollFd<'_>> = links.iter().map(Link::poll_fd).collect();
            poll(&mut fds, PollTimeout::from(left.min(20))).unwrap();
            fds.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty())).collect()
        };
        for (link, _) in links.iter_mut().zip(ready).filter(|(_, is_ready)| *is_ready) {
            assert_eq!(link.service(Instant::now()), LinkState::Open);
            while let Some(message) = link.next_message::<ToAgent>().unwrap() {
                starts += u32::from(matches!(message, ToAgent::Start(_)));
            }
        }
        while begin + Duration::from_millis(next) <= Instant::now() {
            links[(next % u64::from(AGENTS)) as usize].send(&heartbeat());
            next += 1;
        }
    }
    println!(
        "{}",
        serde_json::json!({ "joined_seconds": joined.as_secs_f64(), "started": starts, "heartbeats": next })
    );
}

/// An agent that has joined.
fn connect(endpoint: &Endpoint, credentials: &Credentials, id: u32) -> Link {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let mut dialer = Dialer::new(endpoint, &[], None, credentials.clone(), RunTag::of(""), deadline);
    let mut link = loop {
        if let Some(result) = dialer.service(Instant::now()) {
            break result.unwrap();
        }
        poll(&mut dialer.fds(), PollTimeout::from(100u16)).unwrap();
    };
    let card = NodeCard {
        nodes: (AGENTS + 1, AGENTS + 1),
        ranks: RANKS,
        version: env!("CARGO_PKG_VERSION").into(),
        digest: None,
        arguments: vec!["30".into()],
        ..card(&format!("node{id:04}"), Some(id))
    };
    link.send(&FromAgent::Join(Box::new(card)));
    link
}

//! Hosts that are threads of this process: they meet over loopback.

use std::net::TcpListener;
use std::thread;

use super::host_link::{HostLink, HostMessage};

use super::*;
use crate::nccl::{NcclAdvice, NcclCard, NcclTarget};
use crate::nodes::{Dialer, Link, NodeListener, RunTag, Secret};
use crate::progress::{ProgressPage, RankState};
use crate::rendezvous::message::Manifest;
use crate::rendezvous::{HostedRun, RunningServer, ServedBy, Store};

/// Longer than any test waits.
const LONG: Duration = Duration::from_secs(60);

/// A run of which no other test has the name.
struct Run {
    id: String,
    world_size: u32,
    join_timeout: Duration,
    port: u16,
}

impl Run {
    fn new(name: &str, world_size: u32) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Run { id: format!("{name}-{}", std::process::id()), world_size, join_timeout: LONG, port }
    }

    fn host(&self, first_rank: u32, ranks: u32) -> OwnHost {
        let secret = Secret::new(b"a secret of the tests", "test").unwrap();
        OwnHost {
            first_rank,
            ranks,
            endpoint: Endpoint::of_host("127.0.0.1").with_port(self.port),
            ports: Vec::new(),
            credentials: Credentials::Secret(secret),
            nccl: None,
        }
    }

    /// Joins as `rank` of a host, and serves its ranks if it is the first.
    fn join(&self, host: &OwnHost, rank: u32) -> Result<Member> {
        let run = HostedRun {
            run_id: &self.id,
            title: "a test",
            world_size: self.world_size,
            restart_count: 0,
            join_timeout: self.join_timeout,
            host: Some(host),
        };
        let server = (rank == run.leader()).then(|| run.serve()).transpose()?;
        let served_by = ServedBy::Rank { rank: run.leader(), join_timeout: self.join_timeout };
        let stream = run.connect(rank)?;
        let hello =
            Store::send_hello(stream, served_by, &self.id, rank, self.world_size, Manifest::default())?;
        let (store, page) = hello.wait()?;
        Ok(Member { rank, store, page, server: server.map(|server| server.keep_running()) })
    }

    /// What each rank's body returns, by rank. `hosts`: the first rank and the number of ranks of each.
    fn start<T: Send>(&self, hosts: &[(u32, u32)], body: impl Fn(Result<Member>) -> T + Sync) -> Vec<T> {
        let hosts: Vec<OwnHost> = hosts.iter().map(|(first, ranks)| self.host(*first, *ranks)).collect();
        thread::scope(|scope| {
            let rank = |host, rank| {
                let body = &body;
                scope.spawn(move || body(self.join(host, rank)))
            };
            let ranks = hosts
                .iter()
                .flat_map(|host| (0..host.ranks).map(move |local| (host, host.first_rank + local)));
            let threads: Vec<_> = ranks.map(|(host, number)| rank(host, number)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

struct Member {
    rank: u32,
    store: Store,
    page: ProgressPage,
    server: Option<RunningServer>,
}

impl Member {
    fn leave(self) {
        self.store.leave();
        if let Some(server) = &self.server {
            server.wait_until_idle(|| self.page.first_failed().is_some());
        }
    }
}

#[test]
fn values_and_barriers_reach_all_hosts_and_goodbyes_are_no_failures() {
    for hosts in [&[(0, 2), (2, 2)][..], &[(3, 1), (0, 1), (1, 2)]] {
        let run = Run::new("test-hosts", 4);
        let failed = run.start(hosts, |member| {
            let member = member.unwrap();
            let layout = member.store.layout().unwrap();
            assert_eq!(layout.first_ranks().len(), hosts.len());
            assert_eq!(member.store.address(), Some("127.0.0.1".parse().unwrap()));
            let (rank, next) = (member.rank, (member.rank + 1) % 4);
            member.store.set(&format!("a{rank}"), &[rank as u8], &[], 1).unwrap();
            let (value, _) = member.store.get(&format!("a{next}"), next, LONG).unwrap();
            assert_eq!(value, [next as u8]);
            member.store.barrier("b", LONG).unwrap();
            if member.rank == 3 {
                // The others are on their way out.
                while member.page.state(1) != RankState::Left {
                    thread::yield_now();
                }
            }
            let page = member.page.first_failed();
            member.leave();
            page
        });
        assert_eq!(failed, [None; 4]);
    }
}

#[test]
fn a_rank_that_ends_without_a_goodbye_is_named_on_all_hosts() {
    for culprit in [1, 3] {
        let run = Run::new(&format!("test-ends-{culprit}"), 4);
        let members = run.start(&[(0, 2), (2, 2)], |member| {
            // The connection of the culprit ends here, without a goodbye.
            let member = member.unwrap();
            if member.rank == culprit {
                return None;
            }
            let error = member.store.get("never", (member.rank + 1) % 4, LONG).unwrap_err().to_string();
            Some((member, error))
        });
        for (member, error) in members.into_iter().flatten() {
            assert_eq!(member.page.first_failed(), Some(culprit));
            assert!(error.contains(&format!("rank {culprit} ended without a goodbye")), "{error}");
        }
    }
}

#[test]
fn hosts_whose_ranks_alternate_are_refused_everywhere() {
    let run = Run::new("test-alternate", 4);
    let hosts = [run.host(0, 2), run.host(1, 2)];
    let errors: Vec<String> = thread::scope(|scope| {
        let join = |host| {
            scope.spawn({
                let run = &run;
                move || run.join(host, host.first_rank).map(|_| ()).unwrap_err().to_string()
            })
        };
        hosts.each_ref().map(join).into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        assert!(error.contains("--distribution block"), "{error}");
    }
}

#[test]
fn ranks_of_a_host_that_does_not_come_are_missing() {
    let run = Run { join_timeout: Duration::from_millis(300), ..Run::new("test-missing", 5) };
    let missing =
        |hosts: &[(u32, u32)]| run.start(hosts, |member| member.map(|_| ()).unwrap_err().to_string());
    for error in missing(&[(0, 2), (4, 1)]) {
        assert!(error.contains("for ranks 2, 3"), "{error}");
    }
    for error in missing(&[(2, 2)]) {
        assert!(error.contains("cannot reach rank 0: 127.0.0.1:"), "{error}");
    }
}

#[test]
fn a_wrong_secret_is_named_on_both_sides() {
    let run = Run { join_timeout: Duration::from_millis(500), ..Run::new("test-secret", 2) };
    let (own, mut other) = (run.host(0, 1), run.host(1, 1));
    other.credentials = Credentials::Secret(Secret::new(b"another secret altogether", "test").unwrap());
    let error = |host: &OwnHost| run.join(host, host.first_rank).map(|_| ()).unwrap_err().to_string();
    let errors = thread::scope(|scope| {
        let theirs = scope.spawn(|| error(&other));
        [error(&own), theirs.join().unwrap()]
    });
    assert!(errors[0].contains("and a connection was rejected: 127.0.0.1"), "{errors:?}");
    assert!(errors[1].contains("cannot reach rank 0") && errors[1].contains("secret"), "{errors:?}");
}

impl Run {
    /// A host whose ranks use NCCL.
    fn host_with_nccl(&self, first_rank: u32, ranks: u32) -> OwnHost {
        let nccl = Some(NcclUse { passes_over_idle: Some(true), may_set: false });
        OwnHost { nccl, ..self.host(first_rank, ranks) }
    }
}

/// Waits for the next message but heartbeats.
fn next_message(link: &mut HostLink) -> HostMessage {
    let until = Instant::now() + LONG;
    loop {
        let now = Instant::now();
        if let Some(message) = link.service(now).into_iter().next() {
            return message;
        }
        assert!(link.loss().is_none() && now < until, "no message: {:?}", link.loss());
        let timeout = poll_timeout(Some(until.min(link.next_deadline())), now);
        poll(&mut [link.poll_fd()], timeout).unwrap();
    }
}

/// Waits until `advance` has a result.
fn drive<T>(mut advance: impl FnMut(Instant) -> Option<T>) -> T {
    loop {
        match advance(Instant::now()) {
            Some(result) => return result,
            None => thread::yield_now(),
        }
    }
}

/// What a host says about an interface that it does not have.
fn some_card() -> NcclCard {
    let target = NcclTarget { interface: "eth0".into(), address: [127, 0, 0, 1].into(), port: 1 };
    NcclCard { targets: vec![target], tag: "tag".into(), is_named: false, answer: None }
}

#[test]
fn hosts_that_reach_each_others_interfaces_have_no_notice() {
    let run = Run::new("test-nccl", 3);
    let hosts = [run.host_with_nccl(0, 1), run.host_with_nccl(1, 1), run.host_with_nccl(2, 1)];
    thread::scope(|scope| {
        let rank = |host| {
            let run = &run;
            move || {
                let member = run.join(host, host.first_rank).unwrap();
                assert_eq!(member.store.nccl_advice(), &NcclAdvice::default());
                member.leave();
            }
        };
        for host in &hosts {
            scope.spawn(rank(host));
        }
    });
}

#[test]
fn a_host_that_ends_during_the_check_of_nccl_is_named() {
    let run = Run::new("test-nccl-end", 3);
    let (own, other, lost) = (run.host_with_nccl(0, 1), run.host_with_nccl(1, 1), run.host(2, 1));
    let error = |host: &OwnHost| run.join(host, host.first_rank).map(|_| ()).unwrap_err().to_string();
    let errors = thread::scope(|scope| {
        let ranks = [&own, &other].map(|host| scope.spawn(|| error(host)));
        let credentials = lost.credentials.clone();
        let mut dialer =
            Dialer::new(&lost.endpoint, &[], None, credentials, RunTag::of(&run.id), Instant::now() + LONG);
        let link: Link = drive(|now| dialer.service(now)).unwrap();
        let mut link = HostLink::new(link, Instant::now());
        let nccl = NcclArrival { card: some_card(), may_set: false, variables: Vec::new() };
        let host = "c".to_owned();
        let arrival = Arrival { first_rank: 2, ranks: 1, world_size: 3, host, nccl: Some(nccl) };
        link.send(&HostMessage::Arrived { arrival });
        let message = next_message(&mut link);
        assert!(matches!(message, HostMessage::Reach { .. }), "{message:?}");
        drop(link);
        ranks.map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(error.contains("lost rank 2 in join") && error.contains("host c"), "{error}");
    }
}

#[test]
fn the_end_of_rank_0_during_the_check_of_nccl_is_told() {
    let run = Run::new("test-nccl-hub", 2);
    let host = run.host_with_nccl(1, 1);
    let (ports, run_tag) = ([run.port], RunTag::of(&run.id));
    let mut listener = NodeListener::bind(None, &ports, host.credentials.clone(), run_tag).unwrap();
    let error = thread::scope(|scope| {
        let rank = scope.spawn(|| run.join(&host, 1).map(|_| ()).unwrap_err().to_string());
        let link = drive(|now| listener.service(now).pop());
        let mut link = HostLink::new(link, Instant::now());
        let message = next_message(&mut link);
        assert!(
            matches!(&message, HostMessage::Arrived { arrival } if arrival.nccl.is_some()),
            "{message:?}"
        );
        let NcclCard { targets, tag, .. } = some_card();
        link.send(&HostMessage::Reach { targets, tag });
        let answer = next_message(&mut link);
        assert!(
            matches!(&answer, HostMessage::Reached { answer } if answer.len() == 1 && answer[0].is_some()),
            "{answer:?}"
        );
        drop(link);
        rank.join().unwrap()
    });
    assert!(error.contains("lost rank 0 in join") && error.contains("ended before all hosts"), "{error}");
}

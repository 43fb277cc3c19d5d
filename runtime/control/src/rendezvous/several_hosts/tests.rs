//! Hosts that are threads of this process: they meet over loopback.

use std::net::TcpListener;
use std::thread;

use super::*;
use crate::nodes::Secret;
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

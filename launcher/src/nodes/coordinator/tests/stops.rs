//! Requests to stop that are no first signal of a user, and those that come before or between the starts of the ranks.

use super::*;

const USR1: Option<i32> = Some(Signal::SIGUSR1 as i32);
/// The time of `--stop-after`.
const TIME: Option<i32> = None;

fn asked(signal: Option<i32>, can_stop: Option<bool>) -> FromAgent {
    FromAgent::StopAsked { signal, can_stop }
}

/// The signals that ranks got, without SIGCONT.
fn signals(job: &mut Job) -> Vec<Signal> {
    let sent = job.signals().into_iter().map(|(_, _, signal)| signal);
    sent.filter(|signal| *signal != Signal::SIGCONT).collect()
}

#[test]
fn the_time_of_stop_after_is_no_signal_of_an_agent() {
    let sigterm = FromAgent::Signalled { signal: Signal::SIGTERM as i32, can_stop: false };
    let mut job = Job::running(2, 2, 0);
    job.say(1, asked(TIME, Some(false)));
    assert_eq!(signals(&mut job), [Signal::SIGTERM; 4]);
    job.say(OWN, asked(TIME, Some(false)));
    assert_eq!(signals(&mut job), []);
    // The first signal restarts the time to end, on whichever node it arrives, and the second one kills.
    job.pass(GRACE / 2);
    job.say(OWN, sigterm.clone());
    assert_eq!(signals(&mut job), [Signal::SIGTERM; 4]);
    job.pass(GRACE / 2);
    assert_eq!(signals(&mut job), []);
    job.say(OWN, sigterm);
    assert_eq!(signals(&mut job), [Signal::SIGKILL; 4]);
}

#[test]
fn an_agent_without_ranks_does_not_signal_those_of_others() {
    let mut job = Job::running(2, 2, 0);
    for signal in [TIME, USR1] {
        job.say(1, asked(signal, None));
        assert_eq!(job.signals(), []);
    }
}

/// The agents whose ranks can stop answer, and all ranks are asked.
#[test]
fn a_request_to_an_agent_without_ranks_is_passed_on() {
    let mut job = Job::running(2, 2, 0);
    (2..4).for_each(|rank| job.exit(1, rank, 0));
    let passed = |job: &mut Job| {
        let orders = job.orders().into_iter();
        orders.filter(|(_, order)| matches!(order, Order::PassStop { .. })).count()
    };
    job.say(1, asked(TIME, None));
    assert_eq!(passed(&mut job), 0, "its time comes on every node");
    job.say(1, asked(USR1, None));
    assert_eq!(passed(&mut job), 2);
    job.say(OWN, asked(USR1, Some(true)));
    let said = job.said();
    assert!(said.contains("stopping (SIGUSR1)"), "{said}");
    (0..2).for_each(|rank| job.exit(OWN, rank, 74));
    [1, OWN].into_iter().for_each(|id| job.say(id, FromAgent::Gone { reader_is_gone: false }));
    assert_eq!(job.end().1.exit_code, exit_code::STOPPED);
}

#[test]
fn a_request_after_a_failure_prevents_the_restart() {
    for signal in [TIME, USR1] {
        // While processes are left, and during the pause.
        for all_are_gone in [false, true] {
            let mut job = Job::running(2, 2, 3);
            job.exit(1, 2, 9);
            job.exit(1, 3, 9);
            job.pass(ERROR_TIME);
            (0..2).for_each(|rank| job.exit(OWN, rank, 143));
            job.say(1, FromAgent::Gone { reader_is_gone: false });
            if all_are_gone {
                job.say(OWN, FromAgent::Gone { reader_is_gone: false });
                assert!(job.said().contains("restart 1 of 3"));
            }
            job.say(1, asked(signal, None));
            if !all_are_gone {
                job.say(OWN, FromAgent::Gone { reader_is_gone: false });
            }
            let (ids, outcome) = job.end();
            assert_eq!((ids, outcome.exit_code, outcome.culprit), (vec![OWN, 1], 9, Some(2)));
        }
    }
}

#[test]
fn a_request_before_the_first_start_ends_the_job() {
    for (signal, text) in [(TIME, "--stop-after"), (USR1, "SIGUSR1")] {
        let mut job = Job::new(2, 2, 3);
        job.say(OWN, asked(signal, None));
        let (_, outcome) = job.end();
        let said = format!("stopped on request ({text})");
        assert_eq!((outcome.exit_code, outcome.message), (exit_code::STOPPED, Some(said)));
    }
}

use super::tests::{exited, finish, supervisor};
use super::*;

const STOP_GRACE: Duration = Duration::from_secs(25);
const SIGTERM: StopCause = StopCause::Signal(Signal::SIGTERM);

/// Two ranks, and what the supervisor does when they are asked to stop for this reason.
fn stopping(cause: StopCause) -> (Supervisor, Vec<Action>, Instant) {
    let (supervisor, now) = supervisor(2);
    let mut supervisor = supervisor.with_stop_grace(STOP_GRACE);
    let actions = supervisor.handle(Event::StopAsked(cause), now);
    (supervisor, actions, now)
}

fn kills(actions: &[Action]) -> usize {
    actions.iter().filter(|action| matches!(action, Action::Send(_, Signal::SIGKILL))).count()
}

#[test]
fn ranks_are_asked_and_get_no_signal_that_ends_them() {
    let (mut supervisor, actions, now) = stopping(SIGTERM);
    assert!(actions.contains(&Action::AskToStop), "{actions:?}");
    let signals = actions.iter().filter_map(|action| match action {
        Action::Send(_, signal) => Some(*signal),
        _ => None,
    });
    assert!(signals.eq([Signal::SIGCONT; 2]));
    assert_eq!(supervisor.next_deadline(), Some(now + STOP_GRACE));
    let first = supervisor.handle(exited(1, 74), now);
    assert_eq!(first, [Action::Announce(1, ProcessEnd::Finished)]);
    let last = supervisor.handle(exited(0, 74), now);
    let outcome = finish(&last).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (74, None, true));
    assert!(last.contains(&Action::Settle(outcome.clone())));
}

#[test]
fn the_exit_code_says_whether_to_start_again() {
    let signal = StopCause::Signal;
    for (cause, exits, code) in [
        (SIGTERM, [74, 74], 74),
        (signal(Signal::SIGUSR1), [74, 74], 74),
        (StopCause::Time, [74, 74], 74),
        (StopCause::Rank, [74, 0], 74),
        (signal(Signal::SIGINT), [74, 74], 130),
        (signal(Signal::SIGHUP), [74, 74], 129),
        // They had finished before they could stop.
        (SIGTERM, [0, 0], 0),
        // A failure is one.
        (SIGTERM, [74, 3], 3),
        (SIGTERM, [3, 74], 3),
    ] {
        let (mut supervisor, _, now) = stopping(cause);
        supervisor.handle(exited(0, exits[0]), now);
        let outcome = finish(&supervisor.handle(exited(1, exits[1]), now)).cloned().unwrap();
        assert_eq!(outcome.exit_code, code, "{cause:?} {exits:?}");
        let policy = crate::restart::RestartPolicy { max_restarts: 9, always: true };
        let decision = policy.decide(&outcome, crate::restart::Reached::Step, 0);
        assert_eq!(decision, crate::restart::Decision::Stop(None), "{cause:?} {exits:?}");
    }
}

#[test]
fn the_code_of_a_stop_is_a_failure_if_nobody_asked() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(0, 74), now);
    let outcome = finish(&supervisor.handle(exited(1, 74), now)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (74, Some(0), false));
}

#[test]
fn a_second_signal_kills_and_so_does_the_deadline() {
    let (mut supervisor, _, now) = stopping(SIGTERM);
    let actions = supervisor.handle(Event::StopAsked(SIGTERM), now);
    assert_eq!(kills(&actions), 2, "{actions:?}");
    let (mut supervisor, _, now) = stopping(SIGTERM);
    assert_eq!(kills(&supervisor.handle(Event::Signalled(Signal::SIGINT), now)), 2);

    let (mut supervisor, _, now) = stopping(SIGTERM);
    assert_eq!(supervisor.handle(Event::Tick, now + STOP_GRACE - Duration::from_secs(1)), []);
    let actions = supervisor.handle(Event::Tick, now + STOP_GRACE);
    assert_eq!(kills(&actions), 2, "{actions:?}");
    let Some(Action::Say(text)) = actions.first() else { panic!("{actions:?}") };
    assert!(text.starts_with("ranks 0, 1 did not stop within 25 s: killed"), "{text}");
    let killed = |rank| Event::Exited { rank, exit: Exit::Signal(9), blame: None };
    supervisor.handle(killed(0), now);
    assert_eq!(finish(&supervisor.handle(killed(1), now)).unwrap().exit_code, 143);
}

#[test]
fn only_signals_that_end_a_run_are_counted() {
    let soft = StopCause::Signal(Signal::SIGUSR1);
    let (mut supervisor, _, now) = stopping(soft);
    let later = now + Duration::from_secs(10);
    assert_eq!(supervisor.handle(Event::StopAsked(soft), later), []);
    assert_eq!(supervisor.handle(Event::StopAsked(StopCause::Time), later), []);
    // The first one gives the ranks their time again: Slurm's SIGTERM after its SIGUSR1.
    assert_eq!(supervisor.handle(Event::StopAsked(SIGTERM), later), []);
    assert_eq!(supervisor.next_deadline(), Some(later + STOP_GRACE));
    assert_eq!(kills(&supervisor.handle(Event::StopAsked(SIGTERM), later)), 2);
}

#[test]
fn a_failing_run_that_is_asked_to_stop_is_not_restarted() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(0, 3), now);
    supervisor.handle(Event::StopAsked(StopCause::Time), now);
    let outcome = finish(&supervisor.handle(exited(1, 1), now)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.interrupted), (3, true));
}

#[test]
fn a_rank_of_a_failing_run_that_asks_for_a_stop_does_not_prevent_a_restart() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(0, 3), now);
    assert_eq!(supervisor.handle(Event::StopAsked(StopCause::Rank), now), []);
    let outcome = finish(&supervisor.handle(exited(1, 1), now)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.interrupted), (3, false));
}

#[test]
fn a_failure_during_a_stop_is_not_that_of_a_rank_that_has_stopped() {
    let blame = |exit, culprit| Event::Exited {
        rank: 1,
        exit,
        blame: Some(Blame { culprit, message: "all_reduce failed".into(), timed_out: false }),
    };
    // Before and after the end of the rank that it blames.
    for failure_is_first in [true, false] {
        let (mut supervisor, _, now) = stopping(SIGTERM);
        let mut events = vec![blame(Exit::Code(9), 0), exited(0, 74)];
        if !failure_is_first {
            events.reverse();
        }
        let actions: Vec<Action> =
            events.into_iter().flat_map(|event| supervisor.handle(event, now)).collect();
        assert!(actions.contains(&Action::Announce(0, ProcessEnd::Finished)), "{actions:?}");
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (9, Some(0), true));
        let text = outcome.message.as_ref().unwrap();
        assert!(text.starts_with("rank 0 exited with code 74 while others needed it"), "{text}");
    }
    // Nobody blames anybody.
    let (mut supervisor, _, now) = stopping(SIGTERM);
    supervisor.handle(exited(1, 9), now);
    let outcome = finish(&supervisor.handle(exited(0, 74), now)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (9, Some(1)));
}

/// The signals other than SIGCONT, and how many ranks get each.
fn signals(actions: &[Action]) -> Vec<Signal> {
    let sent = actions.iter().filter_map(|action| match action {
        Action::Send(_, signal) => Some(*signal).filter(|signal| *signal != Signal::SIGCONT),
        _ => None,
    });
    sent.collect()
}

#[test]
fn the_time_of_stop_after_is_not_the_first_of_two_signals() {
    let begin = || {
        let (supervisor, now) = supervisor(2);
        (supervisor.with_stop_grace(STOP_GRACE), now)
    };
    let (mut supervisor, now) = begin();
    assert_eq!(signals(&supervisor.handle(Event::TimePassed, now)), [Signal::SIGTERM; 2]);
    assert_eq!(supervisor.next_deadline(), Some(now + STOP_GRACE));
    let later = now + Duration::from_secs(10);
    assert_eq!(signals(&supervisor.handle(Event::TimePassed, later)), []);
    let sigterm = || Event::Signalled(Signal::SIGTERM);
    assert_eq!(signals(&supervisor.handle(sigterm(), later)), [Signal::SIGTERM; 2]);
    assert_eq!(supervisor.next_deadline(), Some(later + STOP_GRACE));
    assert_eq!(signals(&supervisor.handle(sigterm(), later)), [Signal::SIGKILL; 2]);
    supervisor.handle(exited(0, 1), later);
    let outcome = finish(&supervisor.handle(exited(1, 1), later)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (143, None, true));

    // After a signal it does nothing: that one is still the first of two.
    let (mut supervisor, now) = begin();
    supervisor.handle(sigterm(), now);
    assert_eq!(supervisor.handle(Event::TimePassed, later), []);
    assert_eq!(supervisor.next_deadline(), Some(now + STOP_GRACE));
    assert_eq!(kills(&supervisor.handle(sigterm(), later)), 2);

    // A failing run is not restarted after it.
    let (mut supervisor, now) = begin();
    supervisor.handle(exited(0, 3), now);
    assert_eq!(supervisor.handle(Event::TimePassed, now), []);
    let outcome = finish(&supervisor.handle(exited(1, 1), now)).cloned().unwrap();
    assert_eq!((outcome.exit_code, outcome.interrupted), (3, true));
}

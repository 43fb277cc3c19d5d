use proptest::prelude::*;

use super::*;

const JOIN: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);

pub(super) fn supervisor(ranks: u32) -> (Supervisor, Instant) {
    let now = Instant::now();
    (Supervisor::new(ranks, JOIN, GRACE, now), now)
}

pub(super) fn exited(rank: u32, code: i32) -> Event {
    Event::Exited { rank, exit: Exit::Code(code), blame: None }
}

pub(super) fn finish(actions: &[Action]) -> Option<&Outcome> {
    actions.iter().find_map(|action| match action {
        Action::Finish(outcome) => Some(outcome),
        _ => None,
    })
}

fn any_event(ranks: u32) -> impl Strategy<Value = (u8, u32, i32)> {
    (0u8..6, 0..ranks, prop_oneof![Just(0), 1i32..255])
}

proptest! {
    /// For any events in any order: there is one end, determined by the first failure, and no signal goes to an ended
    /// rank.
    #[test]
    fn there_is_one_outcome_and_no_signal_to_an_ended_rank(
        events in prop::collection::vec(any_event(4), 0..60), steps in prop::collection::vec(0u64..3000, 60)
    ) {
        let (mut supervisor, mut now) = supervisor(4);
        let (mut alive, mut first, mut settled, mut ends) = ([true; 4], None, None, 0);
        let mut clean_up: Vec<(u8, u32, i32)> = (0..4).map(|rank| (0, rank, 0)).collect();
        let mut events = events;
        events.append(&mut clean_up);
        for ((kind, rank, code), step) in events.into_iter().zip(steps.into_iter().chain([1; 4])) {
            now += Duration::from_millis(step);
            let event = match kind {
                0 if alive[rank as usize] => {
                    alive[rank as usize] = false;
                    if code != 0 && first.is_none() {
                        first = Some(code as u8);
                    }
                    exited(rank, code)
                }
                1 => Event::Joined(rank),
                2 => Event::Signalled(Signal::SIGUSR1),
                3 if code == 0 => {
                    first = first.or(Some(143));
                    Event::Signalled(Signal::SIGTERM)
                }
                _ => Event::Tick,
            };
            let before = supervisor.outcome.clone();
            for action in supervisor.handle(event, now) {
                match action {
                    Action::Send(rank, _) => prop_assert!(alive[rank as usize]),
                    Action::Settle(outcome) => {
                        prop_assert!(settled.is_none() && ends == 0);
                        settled = Some(outcome);
                    }
                    Action::Finish(outcome) => {
                        ends += 1;
                        let told = settled.as_ref().map(|told: &Outcome| &told.message);
                        prop_assert_eq!(told, outcome.message.is_some().then_some(&outcome.message));
                        prop_assert!(alive.iter().all(|alive| !alive));
                        if outcome.exit_code != exit_code::NEVER_JOINED {
                            prop_assert_eq!(outcome.exit_code, first.unwrap_or(0));
                        }
                    }
                    // The launcher does not wait for them any longer.
                    Action::Say(text) if text.contains("after SIGKILL: left behind") => alive = [false; 4],
                    Action::Announce(..) | Action::Say(_) | Action::Report | Action::AskToStop => {}
                }
            }
            prop_assert!(before.is_none() || before == supervisor.outcome, "the first cause stays");
            if ends > 0 {
                break;
            }
        }
        prop_assert_eq!(ends, i32::from(alive.iter().all(|alive| !alive)));
    }
}

#[test]
fn a_failure_stops_the_others_in_three_steps() {
    let (mut supervisor, now) = supervisor(3);
    let actions = supervisor.handle(exited(1, 3), now);
    assert_eq!(actions, [Action::Announce(1, ProcessEnd::Failed("exited with code 3".into()))]);
    let at = supervisor.next_deadline().unwrap();
    assert_eq!(at, now + ERROR_TIME);
    let asked = |rank| [Action::Send(rank, Signal::SIGTERM), Action::Send(rank, Signal::SIGCONT)];
    let message = "rank 1 exited with code 3 after 0.0 s; the other ranks are stopped";
    let settled = [Action::Settle(Outcome::failure(3, 1, message.into()))];
    assert_eq!(supervisor.handle(Event::Tick, at), [&settled[..], &asked(0), &asked(2)].concat());
    let end = Event::Exited { rank: 0, exit: Exit::Signal(15), blame: None };
    let sent = "was killed by SIGTERM, which mgpurun sent".into();
    assert_eq!(supervisor.handle(end, at), [Action::Announce(0, ProcessEnd::Failed(sent))]);
    let at = supervisor.next_deadline().unwrap();
    let said = Action::Say("rank 2 did not end within 5 s: killed".into());
    assert_eq!(supervisor.handle(Event::Tick, at), [said, Action::Send(2, Signal::SIGKILL)]);
    let end = Event::Exited { rank: 2, exit: Exit::Signal(9), blame: None };
    let actions = supervisor.handle(end, at);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (3, Some(1)));
    assert_eq!(outcome.message.as_deref(), Some(message));
}

#[test]
fn a_rank_that_exited_early_is_the_culprit() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(0, 0), now);
    let blame = Some(Blame { culprit: 0, timed_out: false, message: "rank 1 lost rank 0".into() });
    let actions = supervisor.handle(Event::Exited { rank: 1, exit: Exit::Code(7), blame }, now);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (7, Some(0)));
    assert!(outcome.message.as_deref().unwrap().contains("rank 0 exited with code 0 while others needed it"));
}

#[test]
fn a_rank_that_others_timed_out_on_is_the_culprit() {
    let (mut supervisor, now) = supervisor(2);
    let blame = Some(Blame { culprit: 1, timed_out: true, message: "rank 0 waited".into() });
    supervisor.handle(Event::Exited { rank: 0, exit: Exit::Code(1), blame }, now);
    let killed = Event::Exited { rank: 1, exit: Exit::Signal(9), blame: None };
    let actions = supervisor.handle(killed, now);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (exit_code::NO_PROGRESS, Some(1)));
}

fn lost(rank: u32, code: i32, culprit: u32) -> Event {
    let blame = Blame { culprit, timed_out: false, message: format!("rank {rank} lost rank {culprit}") };
    Event::Exited { rank, exit: Exit::Code(code), blame: Some(blame) }
}

fn end_of(events: &[Event]) -> (u8, Option<u32>) {
    let (mut supervisor, now) = supervisor(events.len() as u32);
    let actions: Vec<Action> =
        events.iter().flat_map(|event| supervisor.handle(event.clone(), now)).collect();
    let outcome = finish(&actions).unwrap();
    (outcome.exit_code, outcome.culprit)
}

#[test]
fn a_victim_that_exits_before_the_culprit_is_not_the_culprit() {
    assert_eq!(end_of(&[lost(1, 9, 2), lost(0, 9, 2), exited(2, 101)]), (101, Some(2)));
    assert_eq!(end_of(&[lost(0, 9, 1), lost(1, 8, 2), exited(2, 7)]), (7, Some(2)));
    assert_eq!(end_of(&[lost(1, 9, 0), exited(0, 0)]), (9, Some(0)));
    // The ranks blame each other: the first one to end keeps its outcome.
    assert_eq!(end_of(&[lost(1, 9, 0), lost(0, 8, 1)]), (9, Some(1)));
    // Not blamed by the first: it ends later, so it is not the culprit.
    assert_eq!(end_of(&[lost(1, 9, 0), exited(2, 4), lost(0, 8, 1)]), (9, Some(1)));
}

#[test]
fn a_blamed_rank_that_the_launcher_killed_is_not_the_culprit() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(lost(1, 9, 0), now);
    let at = supervisor.next_deadline().unwrap();
    supervisor.handle(Event::Tick, at);
    let killed = Event::Exited { rank: 0, exit: Exit::Signal(15), blame: None };
    let actions = supervisor.handle(killed, at);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (9, Some(1)));
    let message = "rank 1 exited with code 9 after 0.0 s; it blames rank 0; the other ranks are stopped";
    assert_eq!(outcome.message.as_deref(), Some(message));
}

#[test]
fn a_blamed_rank_that_does_not_exist_is_ignored() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(0, 0), now);
    let blame = Some(Blame { culprit: 7, timed_out: true, message: String::new() });
    let actions = supervisor.handle(Event::Exited { rank: 1, exit: Exit::Code(6), blame }, now);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (6, Some(1)));
}

#[test]
fn the_join_timeout_starts_when_the_first_rank_joins() {
    let (mut supervisor, now) = supervisor(3);
    assert_eq!(supervisor.next_deadline(), None);
    supervisor.handle(Event::Joined(0), now);
    supervisor.handle(Event::Joined(2), now + JOIN / 2);
    let at = supervisor.next_deadline().unwrap();
    assert_eq!(at, now + JOIN);
    let end = ProcessEnd::Failed("did not join within 60 s".into());
    assert_eq!(supervisor.handle(Event::Tick, at), [Action::Report, Action::Announce(1, end)]);
    let at = supervisor.next_deadline().unwrap();
    let sent = supervisor.handle(Event::Tick, at);
    // The rank that never joined is killed without being asked.
    assert!(
        sent.contains(&Action::Send(0, Signal::SIGTERM)) && sent.contains(&Action::Send(1, Signal::SIGKILL))
    );
    assert!(!sent.contains(&Action::Send(1, Signal::SIGTERM)));
    assert_eq!(supervisor.outcome.as_ref().unwrap().exit_code, exit_code::NEVER_JOINED);
    assert!(supervisor.outcome.unwrap().message.unwrap().starts_with("rank 1 did not join within 60 s"));
}

#[test]
fn the_second_signal_kills() {
    let (mut supervisor, now) = supervisor(2);
    let sent = supervisor.handle(Event::Signalled(Signal::SIGINT), now);
    let to_both = |signal| [Action::Send(0, signal), Action::Send(1, signal)];
    let settled = [Action::Settle(Outcome::interruption(Signal::SIGINT))];
    assert_eq!(sent, [&settled[..], &to_both(Signal::SIGINT), &to_both(Signal::SIGCONT)].concat());
    let sent = supervisor.handle(Event::Signalled(Signal::SIGINT), now);
    assert_eq!(sent, to_both(Signal::SIGKILL));
    supervisor.handle(exited(0, 0), now);
    let actions = supervisor.handle(exited(1, 0), now);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.interrupted), (130, true));
}

#[test]
fn a_stuck_rank_is_reported_and_announced() {
    let (mut supervisor, now) = supervisor(2);
    let silent = Event::Silent { rank: 1, idle: Duration::from_secs(7), doing: "in step 3".into() };
    let announced = Action::Announce(1, ProcessEnd::Failed("made no progress for 7.0 s".into()));
    assert_eq!(supervisor.handle(silent.clone(), now), [Action::Report, announced]);
    // Handled only once.
    assert_eq!(supervisor.handle(silent, now), []);
    // A victim that ends in between does not become the culprit.
    supervisor.handle(lost(0, 9, 1), now);
    let actions = supervisor.handle(Event::Exited { rank: 1, exit: Exit::Signal(9), blame: None }, now);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit), (exit_code::NO_PROGRESS, Some(1)));
    assert!(outcome.message.as_ref().unwrap().contains("last seen in step 3"));
}

#[test]
fn an_incompatible_rank_ends_the_run() {
    let (mut supervisor, now) = supervisor(2);
    let incompatible = Event::Incompatible {
        rank: 9,
        exit_code: exit_code::PREFLIGHT_WORLD_SIZE,
        why: "rank 9 of 10".into(),
    };
    assert_eq!(supervisor.handle(incompatible, now), []);
    let at = supervisor.next_deadline().unwrap();
    assert_eq!(supervisor.handle(Event::Tick, at).len(), 5);
    supervisor.handle(exited(0, 1), at);
    let actions = supervisor.handle(exited(1, 1), at);
    assert_eq!(finish(&actions).unwrap().exit_code, exit_code::PREFLIGHT_WORLD_SIZE);
}

#[test]
fn the_end_of_the_guardian_kills_the_ranks_at_once() {
    let (mut supervisor, now) = supervisor(2);
    let actions = supervisor.handle(Event::GuardianEnded, now);
    assert!(matches!(&actions[0], Action::Settle(outcome) if outcome.exit_code == 137), "{actions:?}");
    assert_eq!(actions[1..], [Action::Send(0, Signal::SIGKILL), Action::Send(1, Signal::SIGKILL)]);
}

#[test]
fn a_rank_that_sigkill_does_not_end_is_left_behind() {
    let (mut supervisor, now) = supervisor(3);
    supervisor.handle(exited(1, 3), now);
    supervisor.handle(Event::Tick, now + ERROR_TIME);
    let killed = now + ERROR_TIME + GRACE;
    supervisor.handle(Event::Tick, killed);
    supervisor.handle(Event::Exited { rank: 0, exit: Exit::Signal(9), blame: None }, killed);
    // A signal has no effect but another SIGKILL.
    let actions = supervisor.handle(Event::Signalled(Signal::SIGINT), killed + GRACE);
    assert_eq!(actions, [Action::Send(2, Signal::SIGKILL)]);
    assert_eq!(supervisor.next_deadline(), Some(killed + KILLED_TIME));
    let actions = supervisor.handle(Event::Tick, killed + KILLED_TIME);
    let [Action::Say(text), Action::Finish(outcome)] = &actions[..] else { panic!("{actions:?}") };
    assert!(text.starts_with("rank 2 did not end within 30 s after SIGKILL: left behind; "), "{text}");
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (3, Some(1), true));
    assert!(outcome.incompatible, "a restart would not help");
}

#[test]
fn sigquit_only_prints_the_table() {
    let (mut supervisor, now) = supervisor(2);
    assert_eq!(supervisor.handle(Event::Signalled(Signal::SIGQUIT), now), [Action::Report]);
    assert_eq!(supervisor.next_deadline(), None);
}

#[test]
fn ranks_are_stopped_for_a_reason_outside_their_world() {
    let (mut run, now) = supervisor(2);
    let stop = || Event::Stopped("stopped, since job 1 has failed".into());
    let actions = run.handle(stop(), now);
    let Action::Settle(outcome) = &actions[0] else { panic!("{actions:?}") };
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (143, None, false));
    assert_eq!(actions[1..3], [Action::Send(0, Signal::SIGTERM), Action::Send(1, Signal::SIGTERM)]);
    assert_eq!(run.next_deadline(), Some(now + GRACE));
    run.handle(exited(0, 0), now);
    let outcome = finish(&run.handle(exited(1, 9), now)).cloned().unwrap();
    assert_eq!(outcome.message.as_deref(), Some("stopped, since job 1 has failed"));
    // A failure that came before stays the reason.
    let (mut run, now) = supervisor(2);
    run.handle(exited(1, 3), now);
    assert_eq!(run.handle(stop(), now), []);
    assert_eq!(finish(&run.handle(exited(0, 0), now)).unwrap().exit_code, 3);
    // A signal kills ranks that are being stopped.
    let (mut run, now) = supervisor(1);
    run.handle(stop(), now);
    assert_eq!(run.handle(Event::Signalled(Signal::SIGINT), now), [Action::Send(0, Signal::SIGKILL)]);
}

#[test]
fn a_signal_during_the_shutdown_prevents_a_restart() {
    let (mut supervisor, now) = supervisor(2);
    supervisor.handle(exited(1, 3), now);
    supervisor.handle(Event::Tick, now + ERROR_TIME);
    let actions = supervisor.handle(Event::Signalled(Signal::SIGINT), now + ERROR_TIME);
    assert_eq!(actions, [Action::Send(0, Signal::SIGKILL)]);
    let actions =
        supervisor.handle(Event::Exited { rank: 0, exit: Exit::Signal(9), blame: None }, now + ERROR_TIME);
    let outcome = finish(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.culprit, outcome.interrupted), (3, Some(1), true));
}

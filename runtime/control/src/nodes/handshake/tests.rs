use proptest::prelude::*;

use super::super::auth::{Credentials, Secret};
use super::super::channel::MAX_FRAME;
use super::super::munge::fake::FakeRealm;
use super::super::preamble::RunTag;
use super::*;

fn secret(text: &str) -> Credentials {
    Credentials::Secret(Secret::new(text.as_bytes(), "test").unwrap())
}

fn good() -> Credentials {
    secret("a secret of this job")
}

fn dialer(credentials: &Credentials) -> Handshake {
    Handshake::dialer(credentials, RunTag::of("run")).unwrap()
}

fn listener(credentials: &Credentials) -> Handshake {
    Handshake::listener(credentials, RunTag::of("run")).unwrap()
}

/// How one side's handshake ended; `None` if it still waits.
type Outcome = Option<Result<Channel, Fault>>;

/// Gives `side` bytes in chunks, and answers what it asks of munge. Stops when it has ended.
fn feed(side: &mut Handshake, outcome: &mut Outcome, bytes: &[u8], chunk: usize) {
    for part in bytes.chunks(chunk) {
        if outcome.is_none() {
            *outcome = side.advance(part).transpose();
        }
        if let Some((munge, request)) = side.take_request().filter(|_| outcome.is_none()) {
            *outcome = side.answer(munge.perform(request)).transpose();
        }
    }
}

/// Passes bytes between both sides until both are silent. Returns the outcomes, and the bytes of each side.
fn converse(dialer: &mut Handshake, listener: &mut Handshake, chunk: usize) -> ([Outcome; 2], [Vec<u8>; 2]) {
    let (mut outcomes, mut sent) = ([None, None], [Vec::new(), Vec::new()]);
    loop {
        let bytes = dialer.take_output();
        let answer = listener.take_output();
        if bytes.is_empty() && answer.is_empty() {
            return (outcomes, sent);
        }
        feed(listener, &mut outcomes[1], &bytes, chunk);
        feed(dialer, &mut outcomes[0], &answer, chunk);
        sent[0].extend(bytes);
        sent[1].extend(answer);
    }
}

#[track_caller]
fn fault_of(outcome: Outcome) -> Fault {
    match outcome {
        Some(Err(fault)) => fault,
        Some(Ok(_)) => panic!("authenticated"),
        None => panic!("still waits"),
    }
}

/// Sends messages each way.
fn check_channels([one, other]: [Outcome; 2]) {
    let (mut one, mut other) = (one.unwrap().unwrap(), other.unwrap().unwrap());
    for text in ["short".to_owned(), "x".repeat(200_000)] {
        check_direction(&mut one, &mut other, &text);
        check_direction(&mut other, &mut one, &text);
    }
}

fn check_direction(from: &mut Channel, to: &mut Channel, text: &str) {
    let mut bytes = Vec::new();
    from.seal(&text, &mut bytes).unwrap();
    to.open(&bytes).unwrap();
    assert_eq!(to.next_message::<String>(), Ok(Some(text.to_owned())));
    assert_eq!(to.next_message::<String>(), Ok(None));
}

#[test]
fn all_methods_work_in_chunks_of_any_size() {
    for credentials in [good(), Credentials::Munge(Munge::fake(7)), Credentials::None] {
        for chunk in [1, 2, 7, 100, 10_000] {
            let (outcomes, sent) = converse(&mut dialer(&credentials), &mut listener(&credentials), chunk);
            check_channels(outcomes);
            assert!(sent.iter().all(|bytes| bytes.len() < 300), "{sent:?}");
        }
    }
}

#[test]
fn other_credentials_are_refused_on_both_sides() {
    let remedy = "the secrets differ; check that MGPU_SECRET_FILE or MGPU_SECRET is the same on all hosts";
    let ([ours, theirs], _) =
        converse(&mut dialer(&good()), &mut listener(&secret("another secret of a job")), 3);
    assert_eq!(
        fault_of(ours),
        Fault::Authentication(format!("refused authentication by `secret`: {remedy}"))
    );
    assert_eq!(
        fault_of(theirs),
        Fault::Authentication(format!("failed authentication by `secret`: {remedy}"))
    );

    for (here, there) in [(good(), Credentials::None), (Credentials::None, good())] {
        let ([ours, theirs], _) = converse(&mut dialer(&here), &mut listener(&there), 50);
        let text = |wanted: &Credentials, own: &Credentials| {
            format!(
                "wants authentication by `{wanted:?}`, here it is `{own:?}`; give all hosts the same --auth, and the same \
                 secret"
            )
        };
        assert_eq!(fault_of(ours), Fault::Authentication(text(&there, &here)));
        assert_eq!(fault_of(theirs), Fault::Authentication(text(&here, &there)));
    }
}

#[test]
fn failures_of_munge_are_named_on_both_sides() {
    let down = || Credentials::Munge(Munge::new(FakeRealm { user: 7, is_down: true }));
    let up = |user| Credentials::Munge(Munge::fake(user));
    let why = "the credential is of user 7, the coordinator runs as user 8";
    let ([ours, theirs], _) = converse(&mut dialer(&up(7)), &mut listener(&up(8)), 50);
    assert_eq!(fault_of(ours), Fault::Authentication(format!("refused authentication by `munge`: {why}")));
    assert_eq!(fault_of(theirs), Fault::Authentication(format!("failed authentication by `munge`: {why}")));

    let why = "the daemon does not answer";
    let ([ours, theirs], _) = converse(&mut dialer(&down()), &mut listener(&up(7)), 50);
    assert_eq!(
        fault_of(ours),
        Fault::Authentication(format!("wants authentication by `munge`, and here: {why}"))
    );
    assert!(theirs.is_none());

    let why = format!("{why}; both hosts need the same munge key, user and time");
    let ([ours, theirs], _) = converse(&mut dialer(&up(7)), &mut listener(&down()), 50);
    assert_eq!(fault_of(ours), Fault::Authentication(format!("refused authentication by `munge`: {why}")));
    assert_eq!(fault_of(theirs), Fault::Authentication(format!("failed authentication by `munge`: {why}")));
}

#[test]
fn a_credential_of_another_connection_is_refused() {
    let credentials = Credentials::Munge(Munge::fake(7));
    let (_, [recorded, _]) = converse(&mut dialer(&credentials), &mut listener(&credentials), 1000);
    let mut outcome = None;
    feed(&mut listener(&credentials), &mut outcome, &recorded, 1000);
    let why = "failed authentication by `munge`: the credential was made for another connection";
    assert_eq!(fault_of(outcome), Fault::Authentication(why.into()));
}

#[test]
fn nothing_may_be_sent_while_munge_works() {
    let credentials = Credentials::Munge(Munge::fake(7));
    let (mut dialer, mut listener) = (dialer(&credentials), listener(&credentials));
    listener.advance(&dialer.take_output()).unwrap();
    dialer.advance(&listener.take_output()).unwrap();
    assert!(dialer.take_request().is_some());
    assert!(
        matches!(dialer.advance(b"A"), Err(Fault::Protocol(why)) if why == "sent more than it was asked for")
    );
}

#[test]
fn other_runs_are_refused_on_both_sides() {
    let mut other = Handshake::listener(&good(), RunTag::of("another run")).unwrap();
    let ([ours, theirs], _) = converse(&mut dialer(&good()), &mut other, 50);
    for fault in [fault_of(ours), fault_of(theirs)] {
        assert!(
            matches!(&fault, Fault::OtherRun(why) if why.starts_with("belongs to another run: ")),
            "{fault}"
        );
    }
}

/// Replaces a word of what the dialer sends first.
fn converse_with_changed_preamble(from: &str, to: &str) -> [Outcome; 2] {
    let (mut dialer, mut listener) = (dialer(&good()), listener(&good()));
    let line = String::from_utf8(dialer.take_output()).unwrap();
    let changed = line.replacen(from, to, 1);
    assert_ne!(line, changed);
    let mut outcomes = [None, None];
    feed(&mut listener, &mut outcomes[1], changed.as_bytes(), 1000);
    let answer = listener.take_output();
    feed(&mut dialer, &mut outcomes[0], &answer, 1000);
    if outcomes[1].is_none() {
        let packet = dialer.take_output();
        feed(&mut listener, &mut outcomes[1], &packet, 1000);
    }
    outcomes
}

#[test]
fn another_version_is_refused() {
    let [_, theirs] = converse_with_changed_preamble(" 1 ", " 2 ");
    assert!(
        matches!(fault_of(theirs), Fault::Version(why) if why.contains("version 2") && why.contains("version 1"))
    );
}

#[test]
fn a_preamble_that_was_changed_on_the_way_fails_authentication() {
    // The version of mgpurun is not compared here, but it is protected too.
    let version = env!("CARGO_PKG_VERSION");
    let [_, theirs] = converse_with_changed_preamble(version, "9.9.9");
    assert!(matches!(fault_of(theirs), Fault::Authentication(_)));
}

#[test]
fn a_recorded_handshake_is_worthless() {
    let (_, [recorded, answers]) = converse(&mut dialer(&good()), &mut listener(&good()), 1000);
    let mut outcome = None;
    feed(&mut listener(&good()), &mut outcome, &recorded, 1000);
    assert!(matches!(fault_of(outcome), Fault::Authentication(_)));

    let mut outcome = None;
    feed(&mut dialer(&good()), &mut outcome, &answers, 1000);
    assert!(matches!(fault_of(outcome), Fault::Authentication(_)));
}

#[test]
fn a_mirror_is_not_a_coordinator() {
    for credentials in [good(), Credentials::None] {
        let mut dialer = dialer(&credentials);
        let (mut outcome, line) = (None, dialer.take_output());
        feed(&mut dialer, &mut outcome, &line, 1000);
        assert_eq!(
            fault_of(outcome),
            Fault::NotMgpurun("is not mgpurun: it sends back what it receives".into())
        );
    }
}

#[test]
fn changed_bytes_of_the_channel_are_noticed() {
    let ([one, other], _) = converse(&mut dialer(&good()), &mut listener(&good()), 1000);
    let (mut one, mut other) = (one.unwrap().unwrap(), other.unwrap().unwrap());
    let mut bytes = Vec::new();
    one.seal(&"message", &mut bytes).unwrap();
    assert!(!bytes.windows(7).any(|window| window == b"message"), "it is encrypted");
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(other.open(&bytes), Err("received bytes that were changed on the way".into()));
}

#[test]
fn oversized_frames_and_packets_are_refused_before_they_are_read() {
    let (outcomes, _) = converse(&mut dialer(&Credentials::None), &mut listener(&Credentials::None), 1000);
    let [mut channel, _] = outcomes.map(|outcome| outcome.unwrap().unwrap());
    assert!(
        channel.seal(&"x".repeat(MAX_FRAME), &mut Vec::new()).unwrap_err().contains("the maximum is 1048576")
    );
    channel.open(&(MAX_FRAME as u32 + 1).to_le_bytes()).unwrap();
    assert_eq!(
        channel.next_message::<String>(),
        Err("a frame of 1048577 bytes; the maximum is 1048576".into())
    );

    let mut listener = listener(&good());
    assert!(listener.advance(&dialer(&good()).take_output()).unwrap().is_none());
    assert!(matches!(listener.advance(b"A\xff\xff"), Err(Fault::Protocol(_))));
}

#[test]
fn a_truncated_frame_is_no_message() {
    let (outcomes, _) = converse(&mut dialer(&Credentials::None), &mut listener(&Credentials::None), 1000);
    let [mut one, mut other] = outcomes.map(|outcome| outcome.unwrap().unwrap());
    let mut bytes = Vec::new();
    one.seal(&"message", &mut bytes).unwrap();
    for end in 0..bytes.len() {
        other.open(&bytes[end..=end]).unwrap();
        let is_complete = end + 1 == bytes.len();
        assert_eq!(other.next_message::<String>(), Ok(is_complete.then(|| "message".to_owned())), "{end}");
    }
}

#[test]
fn a_refusal_cannot_write_to_the_terminal() {
    let (mut dialer, mut listener) = (dialer(&good()), listener(&good()));
    listener.advance(&dialer.take_output()).unwrap();
    dialer.advance(&listener.take_output()).unwrap();
    let fault = dialer.advance(b"R\0\x07\x1b[2Jno\n").err().unwrap();
    assert_eq!(fault.to_string(), "refused authentication by `secret`: [2Jno");
}

/// Bytes that get far into a handshake: a valid start, then anything.
fn mostly_valid_bytes() -> impl Strategy<Value = Vec<u8>> {
    let line =
        |method| format!("mgpurun-nodes 1 0.1.0 {method} {} {}\n", RunTag::of("run"), RunTag::of("nonce"));
    let start = prop_oneof![
        Just(Vec::new()),
        Just(line("secret").into_bytes()),
        Just([line("secret").as_bytes(), b"A\0\x30"].concat()),
        Just([line("munge").as_bytes(), b"A\0\x50FAKE:\x07\0\0\0"].concat()),
    ];
    (start, any::<Vec<u8>>()).prop_map(|(start, rest)| [start, rest].concat())
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_authenticate(bytes in mostly_valid_bytes(), chunk in 1usize..64) {
        let munge = Credentials::Munge(Munge::fake(7));
        for mut side in [dialer(&good()), listener(&good()), dialer(&munge), listener(&munge)] {
            let mut outcome = None;
            feed(&mut side, &mut outcome, &bytes, chunk);
            prop_assert!(!matches!(outcome, Some(Ok(_))));
            prop_assert!(side.input.len() < 4096 && side.output.len() < 4096);
        }
    }

    #[test]
    fn arbitrary_bytes_after_the_handshake_never_panic(bytes in any::<Vec<u8>>(), encrypted in any::<bool>()) {
        let credentials = if encrypted { good() } else { Credentials::None };
        let (outcomes, _) = converse(&mut dialer(&credentials), &mut listener(&credentials), 1000);
        for outcome in outcomes {
            let mut channel = outcome.unwrap().unwrap();
            if channel.open(&bytes).is_ok() {
                while let Ok(Some(_)) = channel.next_message::<serde_json::Value>() {}
            }
        }
    }
}

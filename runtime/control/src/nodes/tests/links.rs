//! Messages, and how links end.

use super::*;

#[test]
fn messages_travel_both_ways_with_all_methods() {
    for credentials in [good(), Credentials::Munge(Munge::fake(7)), Credentials::None] {
        let (mut one, mut other) = pair(&credentials);
        assert_eq!(one.peer_address(), other.local_address());
        assert_eq!(one.local_address(), other.peer_address());
        one.send(&"question");
        other.send(&vec![1, 2, 3]);
        let (mut question, mut answer) = (None, None);
        serve(&mut one, &mut other, |one, other| {
            question = question.take().or(other.next_message::<String>().unwrap());
            answer = answer.take().or(one.next_message::<Vec<u32>>().unwrap());
            question.is_some() && answer.is_some()
        });
        assert_eq!((question.as_deref(), answer), (Some("question"), Some(vec![1, 2, 3])));
    }
}

#[test]
fn large_messages_travel_in_both_directions_at_once() {
    let (mut one, mut other) = pair(&good());
    let text = "x".repeat(1_000_000);
    for _ in 0..8 {
        one.send(&text);
        other.send(&text);
    }
    assert!(one.wants_to_write(), "it does not fit into the kernel's buffers");
    let mut received = [0, 0];
    serve(&mut one, &mut other, |one, other| {
        for (count, link) in received.iter_mut().zip([one, other]) {
            while let Some(message) = link.next_message::<String>().unwrap() {
                assert!(message == text);
                *count += 1;
            }
        }
        received == [8, 8]
    });
}

#[test]
fn a_closed_link_delivers_what_was_sent_before() {
    let (mut one, mut other) = pair(&good());
    let text = "x".repeat(1_000_000);
    (0..8).for_each(|_| one.send(&text));
    one.close();
    one.send(&"too late");
    let mut received = 0;
    serve(&mut one, &mut other, |_, other| {
        let state = other.service(Instant::now());
        while let Some(message) = other.next_message::<String>().unwrap() {
            assert!(message == text);
            received += 1;
        }
        state == LinkState::Lost(Loss::Ended)
    });
    assert_eq!(received, 8);
    assert_eq!(one.service(Instant::now()), LinkState::Open, "the other side may still send");
    other.send(&"lost");
    let late = one.next_deadline().unwrap();
    assert_eq!(one.service(late), LinkState::Lost(Loss::Ended), "but not for ever");
}

#[test]
fn a_dropped_link_is_noticed_with_its_last_message() {
    let (mut one, mut other) = pair(&good());
    one.send(&"last words");
    drop(one);
    while other.service(Instant::now()) == LinkState::Open {
        wait(vec![other.poll_fd()], None);
    }
    assert_eq!(other.service(Instant::now()), LinkState::Lost(Loss::Ended));
    assert_eq!(other.next_message(), Ok(Some("last words".to_owned())));
}

#[test]
fn a_peer_that_never_reads_loses_the_link_and_not_the_memory() {
    let (mut one, _silent) = pair(&Credentials::None);
    let text = "x".repeat(1_000_000);
    let mut sent = 0;
    while one.service(Instant::now()) == LinkState::Open {
        one.send(&text);
        sent += 1;
        assert!(sent < 1000);
    }
    let LinkState::Lost(Loss::Protocol(why)) = one.service(Instant::now()) else { panic!() };
    assert!(why.starts_with("it does not read: 1") && why.ends_with(" bytes wait to be sent"), "{why}");
}

#[test]
fn an_oversized_message_loses_the_link() {
    let (mut one, _other) = pair(&good());
    one.send(&"x".repeat(2 << 20));
    let why = "cannot send a message of 2097154 bytes; the maximum is 1048576";
    assert_eq!(one.service(Instant::now()), LinkState::Lost(Loss::Protocol(why.into())));
}

#[test]
fn bytes_that_are_no_frame_lose_the_link() {
    let (mut one, mut other) = pair(&Credentials::None);
    one.send(&serde_json::json!({ "relay": "unknown" }));
    serve(&mut one, &mut other, |_, other| other.next_message::<u32>().is_err());
    let LinkState::Lost(Loss::Protocol(why)) = other.service(Instant::now()) else { panic!() };
    assert!(why.starts_with("not a message: "), "{why}");
}

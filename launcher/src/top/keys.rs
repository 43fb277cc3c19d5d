//! Keys from the bytes that a terminal sends. Pure.

/// A key that means something here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Tab,
    Char(char),
}

/// What follows ESC for a key, in the normal and in the application mode of the cursor keys.
const SEQUENCES: [(&[u8], Key); 14] = [
    (b"[A", Key::Up),
    (b"OA", Key::Up),
    (b"[B", Key::Down),
    (b"OB", Key::Down),
    (b"[5~", Key::PageUp),
    (b"[6~", Key::PageDown),
    (b"[H", Key::Home),
    (b"OH", Key::Home),
    (b"[1~", Key::Home),
    (b"[7~", Key::Home),
    (b"[F", Key::End),
    (b"OF", Key::End),
    (b"[4~", Key::End),
    (b"[8~", Key::End),
];

/// The keys in bytes that were read together. Sequences of other keys are skipped.
pub(super) fn keys(mut bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        bytes = rest;
        let key = match first {
            0x1b => {
                let known = SEQUENCES.iter().find(|(sequence, _)| rest.starts_with(sequence));
                match known {
                    Some((sequence, key)) => {
                        bytes = &rest[sequence.len()..];
                        Some(*key)
                    }
                    None if rest.is_empty() => Some(Key::Escape),
                    None => {
                        bytes = after_sequence(rest);
                        None
                    }
                }
            }
            b'\r' | b'\n' => Some(Key::Enter),
            b'\t' => Some(Key::Tab),
            // Ctrl-C, in raw mode.
            3 => Some(Key::Char('q')),
            b' '..=b'~' => Some(Key::Char(char::from(*first))),
            _ => None,
        };
        keys.extend(key);
    }
    keys
}

/// What follows a sequence after ESC: up to its final letter or `~`.
fn after_sequence(bytes: &[u8]) -> &[u8] {
    let is_introduced = bytes.first().is_some_and(|byte| matches!(byte, b'[' | b'O'));
    let parameters = bytes.get(1..).unwrap_or_default();
    match parameters.iter().position(|byte| matches!(byte, b'@'..=b'~')) {
        Some(end) if is_introduced => &parameters[end + 1..],
        _ => bytes.get(1..).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_are_told_apart() {
        for (bytes, expected) in [
            (&b"q"[..], &[Key::Char('q')][..]),
            (b"\x1b[A\x1bOBx", &[Key::Up, Key::Down, Key::Char('x')]),
            (b"\x1b", &[Key::Escape]),
            (b"\r\t\x03", &[Key::Enter, Key::Tab, Key::Char('q')]),
            (b"\x1b[15~\x1b[1;5Cs\x1b[6~", &[Key::Char('s'), Key::PageDown]),
            (b"\xc3\xa9", &[]),
            (b"\x1bxs", &[Key::Char('s')]),
        ] {
            assert_eq!(keys(bytes), expected, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            prop_assert!(keys(&bytes).len() <= bytes.len());
        }
    }
}

//! Cuts text to the width of a terminal. Pure: no I/O.
//!
//! A transient line that is longer than a row would wrap, and the carriage return after it would return to its last row
//! only: each update would leave a row on the screen.

use unicode_width::UnicodeWidthChar;

/// Distance of tab stops.
const TAB: usize = 8;

/// As much of `text` as fits into `columns`. Escape sequences have no width. Those after the cut are dropped, except
/// colours: one of them may reset a colour.
pub(super) fn cut(text: &[u8], columns: usize) -> Vec<u8> {
    let mut kept = Vec::with_capacity(text.len().min(columns.saturating_mul(8)));
    let (mut used, mut is_full, mut rest) = (0, false, text);
    while !rest.is_empty() {
        let length = escape_length(rest);
        if length > 0 {
            let (sequence, behind) = rest.split_at(length);
            let is_color = sequence.starts_with(b"\x1b[") && sequence.ends_with(b"m");
            if !is_full || is_color {
                kept.extend_from_slice(sequence);
            }
            rest = behind;
            continue;
        }
        let (character, behind) = split_character(rest);
        let width = width_of(character, used);
        is_full |= used + width > columns;
        if !is_full {
            kept.extend_from_slice(character);
            used += width;
        }
        rest = behind;
    }
    kept
}

/// Length in bytes of the escape sequence at the start of `text`; 0 if there is none.
fn escape_length(text: &[u8]) -> usize {
    let find = |from: usize, is_end: fn(u8) -> bool| {
        text.iter().skip(from).position(|byte| is_end(*byte)).map(|position| position + from)
    };
    match text {
        // CSI: parameters, then a final byte.
        [0x1b, b'[', ..] => {
            find(2, |byte| (0x40..=0x7e).contains(&byte)).map_or(text.len(), |position| position + 1)
        }
        // OSC and its relatives, such as a title or a link: up to BEL, or ESC with a backslash.
        [0x1b, b']' | b'P' | b'X' | b'^' | b'_', ..] => match find(2, |byte| matches!(byte, 0x07 | 0x1b)) {
            Some(end) if text[end] == 0x07 => end + 1,
            Some(end) if text.get(end + 1) == Some(&b'\\') => end + 2,
            Some(end) => end,
            None => text.len(),
        },
        // Intermediate bytes, then a final one.
        [0x1b, ..] => match find(1, |byte| !(0x20..=0x2f).contains(&byte)) {
            Some(end) if (0x30..=0x7e).contains(&text[end]) => end + 1,
            Some(_) => 1,
            None => text.len(),
        },
        _ => 0,
    }
}

/// The first character, or the first byte if it is invalid UTF-8, and the rest.
fn split_character(text: &[u8]) -> (&[u8], &[u8]) {
    let valid = text.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    text.split_at(valid.chars().next().map_or(1, char::len_utf8))
}

/// Columns that a character takes in column `at`.
fn width_of(character: &[u8], at: usize) -> usize {
    match str::from_utf8(character).ok().and_then(|text| text.chars().next()) {
        Some('\t') => TAB - at % TAB,
        // Control characters have no width; at most they move the cursor back.
        Some(character) => character.width().unwrap_or(0),
        // Shown as a replacement character.
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut_text(text: &str, columns: usize) -> String {
        String::from_utf8(cut(text.as_bytes(), columns)).unwrap()
    }

    #[test]
    fn characters_count_by_their_width() {
        assert_eq!(cut_text("0123456789", 4), "0123");
        assert_eq!(cut_text("0123", 4), "0123");
        // A wide character that does not fit ends the line, even if a later narrow one would fit.
        assert_eq!(cut_text("a訓練b", 4), "a訓");
        assert_eq!(cut_text("e\u{301}e\u{301}e\u{301}", 2), "e\u{301}e\u{301}");
        assert_eq!(cut_text("a\tb", 8), "a\t");
        assert_eq!(cut_text("a\tb", 9), "a\tb");
        assert_eq!(cut(b"\xff\xfeab", 3), b"\xff\xfea");
    }

    #[test]
    fn escape_sequences_take_no_room_and_colours_are_switched_off() {
        assert_eq!(cut_text("\x1b[1;31mred\x1b[0m and more\x1b[K", 3), "\x1b[1;31mred\x1b[0m");
        assert_eq!(cut_text("\x1b[32mgreen\x1b[0m", 2), "\x1b[32mgr\x1b[0m");
        assert_eq!(
            cut_text("\x1b]8;;http://x\x1b\\link\x1b]0;title\x07s", 5),
            "\x1b]8;;http://x\x1b\\link\x1b]0;title\x07s"
        );
        assert_eq!(cut_text("\x1b(Bab\x1b7c", 2), "\x1b(Bab\x1b7");
        assert_eq!(cut_text("ab\x1b[3", 1), "a");
    }

    proptest! {
        /// For any bytes: the result fits, and cutting it again changes nothing.
        #[test]
        fn the_cut_fits(
            text in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'x'), Just(0x1b), Just(b'['), Just(b'm')], 0..80),
            columns in 0usize..40,
        ) {
            let kept = cut(&text, columns);
            prop_assert!(kept.len() <= text.len());
            prop_assert_eq!(cut(&kept, columns), kept.clone());
            prop_assert_eq!(cut(&kept, usize::MAX), kept);
        }

        #[test]
        fn plain_text_is_a_prefix(text in "[a-z ]{0,60}", columns in 0usize..80) {
            let kept = cut_text(&text, columns);
            prop_assert_eq!(&kept, &text[..text.len().min(columns)]);
        }
    }
}

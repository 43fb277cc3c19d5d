//! A text in shared memory.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// A text that is written once. Readers never see a part of it, because its length is stored last.
#[repr(C)]
pub(super) struct SharedText<const BYTES: usize = CAPACITY> {
    len: AtomicU32,
    bytes: [AtomicU8; BYTES],
}

/// Capacity of most texts in bytes.
pub(super) const CAPACITY: usize = 380;

impl<const BYTES: usize> SharedText<BYTES> {
    /// Stores `text`, truncated to the capacity. Does nothing if a text is already stored: the first cause is kept.
    pub(super) fn set_once(&self, text: &str) {
        if self.len.load(Ordering::Acquire) != 0 {
            return;
        }
        let end = kept(text, BYTES);
        for (cell, byte) in self.bytes.iter().zip(&text.as_bytes()[..end]) {
            cell.store(*byte, Ordering::Relaxed);
        }
        self.len.store(end as u32, Ordering::Release);
    }

    /// The text, empty if none was set. Invalid UTF-8 of a misbehaving writer becomes U+FFFD.
    pub(super) fn get(&self) -> String {
        let len = (self.len.load(Ordering::Acquire) as usize).min(BYTES);
        let bytes: Vec<u8> = self.bytes[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Truncates `text` to what a [`SharedText`] keeps of it.
pub(crate) fn truncate(text: &mut String) {
    text.truncate(kept(text, CAPACITY));
}

/// How many bytes of `text` are kept: whole characters.
fn kept(text: &str, capacity: usize) -> usize {
    let mut end = text.len().min(capacity);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}

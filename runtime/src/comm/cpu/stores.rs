//! How ranks write slots that peers read, and results: through the caches, or around them.
//!
//! # Slots
//!
//! A peer on a core with the same last-level cache finds the lines of a slot there. For cores of different chiplets or sockets
//! each line comes out of the caches of the other one, one by one, which takes five times as long as to read it from memory. So
//! there slots are written with non-temporal stores, which go to memory.
//!
//! Which is faster depends on where ranks run, and the operating system or a hypervisor may move them. So both are timed while
//! operations run: some blocks, and now and then one that is written the other way. With its arrival each rank publishes
//! which it prefers for this size, and if one of them prefers to go around the caches, all do from then on. The bytes are the
//! same either way.
//!
//! # Results
//!
//! A result that is only copied goes to memory whose lines nobody has in a cache, if the payload is large. A cached store first
//! reads such a line, so a third of the traffic to memory is for nothing. Where the payloads of all ranks fill the last-level
//! cache, results are written with non-temporal stores. (A reduction reads what it overwrites, and gains nothing.)

use std::sync::LazyLock;

use mgpu_kernels::copy::copy;

/// How memory is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stores {
    #[default]
    Cached,
    /// Non-temporal.
    Uncached,
}

impl Stores {
    fn other(self) -> Self {
        match self {
            Stores::Cached => Stores::Uncached,
            Stores::Uncached => Stores::Cached,
        }
    }

    /// For the results of copies, with payloads of `bytes` bytes on each of `ranks` ranks.
    pub(super) fn of_results(bytes: usize, ranks: u32) -> Self {
        if bytes.saturating_mul(ranks as usize) < *FILLS_CACHES { Stores::Cached } else { Stores::Uncached }
    }

    /// Copies `bytes` bytes.
    ///
    /// # Safety
    /// Both ranges are valid and do not overlap; nobody writes the source or accesses the destination meanwhile.
    pub(super) unsafe fn copy(self, source: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Stores::Cached => copy(source, to, bytes),
                Stores::Uncached => copy_uncached(source, to, bytes),
            }
        }
    }
}

/// Bytes of payloads that fill the last-level cache: half of its size, since programs have other data, too. At most
/// [`MOST_CACHED`], because a virtual machine sees the whole cache of a processor that it shares with others.
static FILLS_CACHES: LazyLock<usize> = LazyLock::new(|| {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    size.ok().and_then(|size| bytes_of(&size)).map_or(MOST_CACHED, |size| (size / 2).min(MOST_CACHED))
});

/// See [`FILLS_CACHES`].
const MOST_CACHED: usize = 32 << 20;

/// The bytes of a size as the kernel writes it, for example `32768K`.
fn bytes_of(size: &str) -> Option<usize> {
    size.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1 << 10)
}

/// Copies with non-temporal stores, which are complete when it returns.
///
/// # Safety
/// As [`Stores::copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_uncached(source: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const VECTOR: usize = size_of::<__m128i>();
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all offsets are below `bytes`; vectors are stored at multiples of a line. The fence orders the non-temporal
    // stores before the flag that publishes them.
    unsafe {
        std::ptr::copy_nonoverlapping(source, to, head);
        for line in (head..tail).step_by(LINE) {
            let values: [__m128i; LINE / VECTOR] =
                std::array::from_fn(|part| _mm_loadu_si128(source.add(line + part * VECTOR).cast()));
            for (part, value) in values.into_iter().enumerate() {
                _mm_stream_si128(to.add(line + part * VECTOR).cast(), value);
            }
        }
        std::ptr::copy_nonoverlapping(source.add(tail), to.add(tail), bytes - tail);
        _mm_sfence();
    }
}

/// Other processors have no such stores for whole lines, or Miri does not know them.
///
/// # Safety
/// As [`Stores::copy`].
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn copy_uncached(source: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source, to, bytes) };
}

/// Times of each kind that are kept: the shortest one counts, since a rank may be interrupted.
const KEPT: usize = 4;
/// One of as many blocks is timed.
const TIMED: u32 = 16;
/// One of as many blocks is written in the other way.
const TRIED: u32 = 128;

/// The classes of sizes, from 1 KiB to the largest slot.
const CLASSES: usize = 8;
const SMALLEST: u32 = 10;

/// The choices of a communicator, one for each class of sizes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Choices([Choice; CLASSES]);

impl Choices {
    /// The choice for slots of `bytes` bytes.
    pub(super) fn of(&mut self, bytes: usize) -> &mut Choice {
        let class = bytes.max(1).ilog2().saturating_sub(SMALLEST) as usize;
        &mut self.0[class.min(CLASSES - 1)]
    }
}

/// How blocks of about the same size are written. Equal on all ranks, except for the times.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Choice {
    /// Number of blocks so far; wraps.
    blocks: u32,
    /// What the ranks have agreed on.
    agreed: Stores,
    /// The latest times, in nanoseconds for 1 MiB, and how many there were.
    times: [([u64; KEPT], usize); 2],
}

impl Choice {
    /// How to write a block, `ahead` blocks after those that were counted.
    pub(super) fn stores(&self, ahead: usize) -> Stores {
        match self.blocks.wrapping_add(ahead as u32) {
            block if (block as usize) < KEPT => Stores::Cached,
            block if (block as usize) < 2 * KEPT => Stores::Uncached,
            block if block % TRIED == TRIED / 2 => self.agreed.other(),
            _ => self.agreed,
        }
    }

    /// Whether to time that block.
    pub(super) fn is_timed(&self, ahead: usize) -> bool {
        let block = self.blocks.wrapping_add(ahead as u32);
        (block as usize) < 2 * KEPT || block.is_multiple_of(TIMED)
    }

    /// Adds a time: a block of `bytes` bytes was written and read in `nanoseconds`.
    pub(super) fn add(&mut self, stores: Stores, bytes: usize, nanoseconds: u64) {
        let (kept, count) = &mut self.times[stores as usize];
        kept[*count % KEPT] = (nanoseconds << 20) / bytes.max(1) as u64;
        *count += 1;
    }

    /// What this rank prefers: the kind with the shortest of the latest times.
    pub(super) fn preferred(&self) -> Stores {
        let shortest = |stores: Stores| {
            let (kept, count) = &self.times[stores as usize];
            kept[..KEPT.min(*count)].iter().min().copied()
        };
        match (shortest(Stores::Cached), shortest(Stores::Uncached)) {
            (Some(cached), Some(uncached)) if uncached < cached => Stores::Uncached,
            _ => Stores::Cached,
        }
    }

    /// Sets what the ranks have agreed on.
    pub(super) fn agree(&mut self, agreed: Stores) {
        self.agreed = agreed;
    }

    /// Counts the blocks of an operation.
    pub(super) fn pass(&mut self, blocks: usize) {
        self.blocks = self.blocks.wrapping_add(blocks as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_the_same_bytes() {
        let source: Vec<u8> = (0..1000).map(|index| (index * 7 % 251) as u8).collect();
        for (from, at, bytes) in [(0, 0, 1000), (1, 0, 640), (3, 5, 130), (0, 1, 63), (0, 64, 64), (9, 9, 0)]
        {
            for stores in [Stores::Cached, Stores::Uncached] {
                let mut slot = vec![0xff; 1100];
                // SAFETY: both ranges are within their vectors.
                unsafe { stores.copy(source[from..].as_ptr(), slot[at..].as_mut_ptr(), bytes) };
                assert_eq!(slot[at..at + bytes], source[from..from + bytes]);
                assert!(slot[..at].iter().chain(&slot[at + bytes..]).all(|byte| *byte == 0xff));
            }
        }
    }

    #[test]
    fn sizes_of_caches_are_read() {
        assert_eq!(bytes_of("32768K\n"), Some(32 << 20));
        for unknown in ["", "K", "32M", "-1K", "99999999999999999999K", "18446744073709551615K"] {
            assert_eq!(bytes_of(unknown), None, "{unknown}");
        }
        assert_eq!(Stores::of_results(4096, 2), Stores::Cached);
        assert_eq!(Stores::of_results(MOST_CACHED, 2), Stores::Uncached);
        assert_eq!(Stores::of_results(usize::MAX, 2), Stores::Uncached);
    }

    /// Passes blocks that take `cached` or `uncached` nanoseconds, and returns how the last ones were written.
    fn pass(choice: &mut Choice, blocks: usize, [cached, uncached]: [u64; 2]) -> Vec<Stores> {
        let one = |_| {
            let stores = choice.stores(0);
            if choice.is_timed(0) {
                choice.add(stores, 1 << 20, if stores == Stores::Cached { cached } else { uncached });
            }
            choice.agree(choice.preferred());
            choice.pass(1);
            stores
        };
        (0..blocks).map(one).collect()
    }

    #[test]
    fn the_faster_way_is_found_and_found_again_when_ranks_move() {
        let mut choice = Choice::default();
        let share = |stores: &[Stores]| stores.iter().filter(|stores| **stores == Stores::Uncached).count();
        // On cores with a common cache.
        assert_eq!(share(&pass(&mut choice, 1024, [100, 200])), KEPT + 8);
        // On cores of different sockets: known after some timed blocks.
        let far = pass(&mut choice, 1024, [900, 180]);
        assert_eq!((share(&far[..3 * TIMED as usize]), share(&far[128..])), (0, 896 - 7));
        // Back: known after the next trial.
        let near = pass(&mut choice, 1024, [100, 200]);
        assert_eq!(share(&near[128..]), 7);
        // One interrupted block changes nothing.
        choice.add(Stores::Cached, 1 << 20, 1_000_000);
        assert_eq!(choice.preferred(), Stores::Cached);
    }
}

//! Shared memory in the place of a program's own pages.
//!
//! Memory that another library has allocated, say the gradients of a tensor library, cannot be mapped by other processes.
//! Its whole pages can be replaced by pages of a shared file with the same contents: the program keeps its addresses, and
//! peers map the file.
//!
//! Both directions copy the contents to a new mapping elsewhere and then move that mapping to the address with one system
//! call, so there is always memory at the address, and a failure leaves what was there before.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use nix::libc::c_void;
use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags, mmap, mmap_anonymous, mremap, munmap};

use super::{SharedMemory, page_size};
use crate::{Error, Result};

const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// Pages of a program that are shared memory for now. Dropping it makes them private again, with their current contents.
#[derive(Debug)]
pub struct ReplacedPages {
    address: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: the pages belong to the process, not to a thread.
unsafe impl Send for ReplacedPages {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl Sync for ReplacedPages {}

impl SharedMemory {
    /// Puts the `len` bytes of this file from `offset` on in the place of the private memory at `address`, with its
    /// contents. `fd` is the file's.
    ///
    /// # Safety
    /// The `len` bytes at `address` are private memory of this process ([`is_private`]). Until the result is dropped they
    /// stay allocated. No other thread accesses them during this call, nor while the result is dropped. Nothing refers to
    /// their physical pages, such as a device or the kernel's I/O rings.
    ///
    /// # Errors
    /// If the kernel has no memory for the mapping. Then nothing has changed.
    ///
    /// # Panics
    /// If address, offset or length are no multiples of a page, or the range is past the file's end.
    pub unsafe fn replace_pages(
        &self,
        fd: BorrowedFd<'_>,
        offset: usize,
        address: NonNull<u8>,
        len: NonZeroUsize,
    ) -> Result<ReplacedPages> {
        let page = page_size();
        assert!(
            [offset, address.as_ptr() as usize, len.get()].iter().all(|number| number.is_multiple_of(page))
        );
        assert!(offset + len.get() <= self.size(), "pages past the end of shared memory");
        let failed = |errno: nix::errno::Errno| {
            Error::system(format!("map {len} bytes of shared memory over private memory"), errno)
        };
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other mapping.
        let new = unsafe { mmap(None, len, READ_WRITE, MapFlags::MAP_SHARED, fd, offset as i64) }
            .map_err(failed)?;
        // SAFETY: both ranges are mapped and `len` bytes long, and the caller promises that nobody writes the source.
        unsafe { std::ptr::copy_nonoverlapping(address.as_ptr(), new.cast().as_ptr(), len.get()) };
        // SAFETY: the new mapping has the contents of what it replaces; the caller's promise.
        unsafe { move_mapping(new, address, len) }.map_err(failed)?;
        Ok(ReplacedPages { address, len })
    }
}

impl ReplacedPages {
    /// Makes the pages private again.
    ///
    /// # Errors
    /// If memory is short. Then they stay shared.
    fn restore(&self) -> nix::Result<()> {
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other mapping.
        let new = unsafe { mmap_anonymous(None, self.len, READ_WRITE, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: both ranges are mapped and `len` bytes long. If peers still write after a failed operation, the contents
        // are unspecified, but any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(self.address.as_ptr(), new.cast().as_ptr(), self.len.get()) };
        // SAFETY: as in `replace_pages`.
        unsafe { move_mapping(new, self.address, self.len) }
    }
}

impl Drop for ReplacedPages {
    fn drop(&mut self) {
        // Without memory for private pages the shared ones stay: their contents are the same.
        let _ = self.restore();
    }
}

/// Moves the mapping at `from` to `to`, in the place of what is mapped there. On an error it is unmapped instead.
///
/// # Safety
/// `from` is a mapping of `len` bytes that nothing refers to; what is mapped at `to` may be replaced.
unsafe fn move_mapping(from: NonNull<c_void>, to: NonNull<u8>, len: NonZeroUsize) -> nix::Result<()> {
    let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { mremap(from, len.get(), len.get(), flags, Some(to.cast())) };
    moved.map(drop).inspect_err(|_| {
        // SAFETY: nothing refers to the mapping.
        let _ = unsafe { munmap(from, len.get()) };
    })
}

/// Whether these bytes are private, writable memory that belongs to no file, and not a stack. `false` if the kernel does not
/// tell (without `/proc`).
pub fn is_private(address: NonNull<u8>, len: usize) -> bool {
    let begin = address.as_ptr() as usize;
    std::fs::read_to_string("/proc/self/maps")
        .is_ok_and(|maps| covers_privately(&maps, begin, begin.saturating_add(len)))
}

/// Whether the mappings in `maps`, in the format of `/proc/PID/maps`, cover `begin..end` with private memory.
fn covers_privately(maps: &str, begin: usize, end: usize) -> bool {
    let mut covered = begin;
    for (from, to, is_private) in maps.lines().filter_map(mapping) {
        if to <= covered || from >= end {
            continue;
        }
        if from > covered || !is_private {
            return false;
        }
        covered = to;
    }
    covered >= end
}

/// The bounds of a line's mapping, and whether it is private memory.
fn mapping(line: &str) -> Option<(usize, usize, bool)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let (permissions, inode) = (fields.next()?, fields.nth(2)?);
    let is_stack = fields.next().is_some_and(|name| name.starts_with("[stack"));
    let is_private = permissions.starts_with("rw") && permissions.ends_with('p') && inode == "0" && !is_stack;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?, is_private))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Private pages of a test.
    fn pages(count: usize) -> (NonNull<u8>, NonZeroUsize) {
        let len = NonZeroUsize::new(count * page_size()).unwrap();
        // SAFETY: a new mapping.
        let address = unsafe { mmap_anonymous(None, len, READ_WRITE, MapFlags::MAP_PRIVATE) }.unwrap();
        (address.cast(), len)
    }

    fn read(address: NonNull<u8>, at: usize) -> u8 {
        // SAFETY: the test's own pages; volatile, because they are mapped twice.
        unsafe { address.as_ptr().add(at).read_volatile() }
    }

    fn write(address: *mut u8, at: usize, value: u8) {
        // SAFETY: as above.
        unsafe { address.add(at).write_volatile(value) }
    }

    #[test]
    fn contents_survive_both_directions_and_are_shared_in_between() {
        let (page, (address, len)) = (page_size(), pages(4));
        let inner = NonZeroUsize::new(2 * page).unwrap();
        (0..len.get()).for_each(|at| write(address.as_ptr(), at, (at % 251) as u8));
        let (memory, fd) = SharedMemory::create("test", 8 * page).unwrap();
        let middle = NonNull::new(address.as_ptr().wrapping_add(page)).unwrap();
        // SAFETY: two of the test's own pages, which nobody else accesses.
        let replaced = unsafe { memory.replace_pages(fd.as_fd(), 3 * page, middle, inner) }.unwrap();
        assert!((0..len.get()).all(|at| read(address, at) == (at % 251) as u8));
        assert!(!is_private(middle, inner.get()) && is_private(address, page));
        // What a peer writes is seen here, and the reverse.
        write(memory.at(3 * page), 7, 200);
        write(middle.as_ptr(), 8, 201);
        // SAFETY: within the file, which no other process maps.
        assert_eq!((read(middle, 7), unsafe { memory.at(3 * page + 8).read_volatile() }), (200, 201));
        drop(memory);
        drop(replaced);
        assert!(is_private(address, len.get()));
        assert_eq!(
            [6, 7, 8, 9].map(|at| read(middle, at)),
            [((page + 6) % 251) as u8, 200, 201, ((page + 9) % 251) as u8]
        );
        // SAFETY: the test's own pages.
        unsafe { munmap(address.cast(), len.get()) }.unwrap();
    }

    #[test]
    fn a_failure_leaves_the_memory_as_it_was() {
        let (page, (address, len)) = (page_size(), pages(1));
        write(address.as_ptr(), 5, 99);
        let (memory, fd) = SharedMemory::create("test", page).unwrap();
        let read_only = SharedMemory::open_for_reading("test", fd.as_fd()).unwrap();
        drop(read_only);
        let other = std::fs::File::open("/proc/self/exe").unwrap();
        // A file that is not open for writing cannot be mapped so.
        // SAFETY: the test's own page.
        unsafe { memory.replace_pages(other.as_fd(), 0, address, len) }.unwrap_err();
        assert!(is_private(address, len.get()) && read(address, 5) == 99);
        // SAFETY: the test's own page.
        unsafe { munmap(address.cast(), len.get()) }.unwrap();
    }

    #[test]
    fn only_private_memory_without_gaps_counts() {
        let maps = "1000-3000 rw-p 00000000 00:00 0\n3000-4000 rw-p 00000000 00:00 0          [heap]\n\
                    5000-6000 rw-s 00000000 00:01 77   /memfd:arena (deleted)\n\
                    6000-7000 r--p 00000000 00:00 0\n7000-8000 rw-p 00001000 fd:00 12  /lib/libc.so.6\n\
                    8000-9000 rw-p 00000000 00:00 0    [stack]\nno mapping\n";
        for (begin, end, expected) in [
            (0x1000, 0x3000, true),
            (0x1800, 0x3800, true),
            (0x3000, 0x4000, true),
            (0x3000, 0x5000, false),
            (0x0800, 0x2000, false),
            (0x5000, 0x6000, false),
            (0x6000, 0x7000, false),
            (0x7000, 0x8000, false),
            (0x8000, 0x8800, false),
            (0xa000, 0xb000, false),
        ] {
            assert_eq!(covers_privately(maps, begin, end), expected, "{begin:x}..{end:x}");
        }
    }
}

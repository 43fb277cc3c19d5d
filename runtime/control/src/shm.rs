//! Anonymous shared memory: memfd files, sealed against resizing, passed over the rendezvous socket.
//!
//! Nothing appears in `/dev/shm` or any folder, no size limit of a mount applies, and the kernel frees the memory
//! when the last process that maps it has ended, however it ended. The seals make it safe to map a file of another
//! process: without them that process could shrink the file, and our next access would raise SIGBUS.

mod replaced;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Index;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

pub use replaced::{ReplacedPages, is_private};

use crate::{Error, Result};

/// Types that may be placed in memory that other processes write at any time.
///
/// # Safety
/// The type consists of atomics (and arrays and structs of them) only, and every bit pattern is a valid value.
pub unsafe trait Shared {}

/// A shared mapping of a sealed memfd.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; callers of `at` synchronise access to its bytes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; the struct itself is never written after its construction.
unsafe impl Sync for SharedMemory {}

const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

impl SharedMemory {
    /// Creates a sealed, zeroed file of `len` bytes and maps it. No memory is allocated before [`reserve`].
    pub fn create(name: &str, len: usize) -> Result<(Self, OwnedFd)> {
        let failed =
            |why: String| Error::system(format!("create {len} bytes of shared memory ({name})"), why);
        // The kernel treats this memory as a file, and kills a process that exceeds the file size limit (SIGXFSZ).
        if let Some(limit) = file_size_limit().filter(|limit| len as u64 > *limit) {
            return Err(failed(format!(
                "files are limited to {limit} bytes; raise the limit with `ulimit -f`"
            )));
        }
        let attempt = || -> nix::Result<OwnedFd> {
            let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
            ftruncate(&fd, len as i64)?;
            fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))?;
            Ok(fd)
        };
        let fd = attempt().map_err(|errno| failed(errno.to_string()))?;
        Ok((Self::map(name, fd.as_fd(), len)?, fd))
    }

    /// Maps a file received from another process, after checking that it is sealed and `len` bytes long.
    pub fn open(name: &str, fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let found = Self::sealed_len(name, fd)?;
        if found != len {
            let problem = format!("the shared memory has {found} bytes instead of {len}");
            return Err(Error::Protocol { peer: format!("the owner of {name}"), problem });
        }
        Self::map(name, fd, len)
    }

    /// Maps a sealed file of another process read-only, whatever its length: a write through [`view`](Self::view) would
    /// kill this process (SIGSEGV).
    pub fn open_for_reading(name: &str, fd: BorrowedFd<'_>) -> Result<Self> {
        let len = Self::sealed_len(name, fd)?;
        Self::map_with(name, fd, len, ProtFlags::PROT_READ)
    }

    /// Length of a file that is sealed against shrinking.
    fn sealed_len(name: &str, fd: BorrowedFd<'_>) -> Result<usize> {
        let bad = |problem: String| Error::Protocol { peer: format!("the owner of {name}"), problem };
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS)
            .map_err(|errno| bad(format!("the descriptor is not shared memory: {errno}")))?;
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(bad("the shared memory is not sealed against shrinking".into()));
        }
        let found = fstat(fd).map_err(|errno| Error::system(format!("inspect {name}"), errno))?.st_size;
        Ok(found as usize)
    }

    fn map(name: &str, fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        Self::map_with(name, fd, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
    }

    fn map_with(name: &str, fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> Result<Self> {
        let size =
            NonZeroUsize::new(len).ok_or_else(|| Error::system(format!("map {name}"), "it is empty"))?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other mapping.
        let base = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, fd, 0) }
            .map_err(|errno| Error::system(format!("map {len} bytes of {name}"), errno))?;
        // Huge pages are optional: if the kernel has none for shared memory, it uses small pages.
        // SAFETY: the range is the mapping just made, and the advice does not change its contents.
        let _ = unsafe { madvise(base, len, MmapAdvise::MADV_HUGEPAGE) };
        Ok(SharedMemory { base: base.cast(), len })
    }

    /// Number of bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Address of byte `offset`.
    ///
    /// # Panics
    /// If `offset` is past the end.
    #[inline]
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} in {} bytes of shared memory", self.len);
        // SAFETY: the assertion keeps the address inside the mapping or one past its end.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// A `T` at byte `offset`.
    ///
    /// # Panics
    /// If it does not fit or is misaligned.
    #[inline]
    pub fn view<T: Shared>(&self, offset: usize) -> &T {
        let end = offset.checked_add(size_of::<T>());
        assert!(end.is_some_and(|end| end <= self.len), "a view past the end of shared memory");
        let address = self.at(offset).cast::<T>();
        assert!(address.is_aligned(), "a misaligned view of shared memory");
        // SAFETY: in bounds and aligned by the assertions, mapped as long as `self` lives, and `Shared` guarantees that
        // any bytes are a valid value and that all access is atomic.
        unsafe { &*address }
    }
}

impl SharedMemory {
    /// Populates this process's page table with the pages, so that first uses cause no page faults.
    pub fn map_pages(&self) {
        // Best effort: a page that is not mapped now is mapped at its first use.
        // SAFETY: the range is the whole mapping; populating it does not change its contents.
        let _ = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE) };
    }
}

/// A row of `T`s in shared memory. Its place is checked once, and not at every access as that of a [view](SharedMemory::view):
/// small collectives are that sensitive.
pub struct SharedArray<T> {
    /// Keeps the elements mapped.
    _memory: Arc<SharedMemory>,
    first: NonNull<T>,
    len: usize,
}

// SAFETY: as for `SharedMemory`, and all access to a `Shared` type is atomic.
unsafe impl<T: Shared> Send for SharedArray<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for SharedArray<T> {}

impl<T: Shared> SharedArray<T> {
    /// The `len` elements that begin at byte `offset`.
    ///
    /// # Panics
    /// If they do not fit or are misaligned.
    pub fn new(memory: &Arc<SharedMemory>, offset: usize, len: usize) -> Self {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= memory.len), "an array past the end of shared memory");
        let first = memory.at(offset).cast::<T>();
        assert!(first.is_aligned(), "a misaligned array in shared memory");
        let first = NonNull::new(first).expect("the kernel maps nothing at address 0");
        SharedArray { _memory: Arc::clone(memory), first, len }
    }
}

impl<T> fmt::Debug for SharedArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements at {:?}", self.len, self.first)
    }
}

impl<T: Shared> Index<u32> for SharedArray<T> {
    type Output = T;

    /// # Panics
    /// If there is no such element.
    #[inline]
    fn index(&self, index: u32) -> &T {
        assert!((index as usize) < self.len, "element {index} of {}", self.len);
        // SAFETY: in bounds by the assertions here and in `new`, aligned, mapped as long as `self` lives, and `Shared`
        // guarantees that any bytes are a valid value and that all access is atomic.
        unsafe { self.first.add(index as usize).as_ref() }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the range is the one mapped at construction and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Limit on the size of files that this process writes, in bytes; `None` if the system does not tell.
fn file_size_limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_FSIZE).ok().map(|(soft, _)| soft)
}

/// Size of a page of memory in bytes: 4 KiB on x86-64; on Arm also 64 KiB.
pub fn page_size() -> usize {
    // SAFETY: a query without side effects.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Allocates the memory behind a range of `memory` now, so that a shortage is an error here and not a SIGBUS at first
/// use.
///
/// Each rank reserves its own part, because pages are allocated on the NUMA node of the process that requests them. The
/// request goes through the mapping, because only the mapping has the advice to use huge pages.
pub fn reserve(
    name: &str,
    memory: &SharedMemory,
    fd: BorrowedFd<'_>,
    offset: usize,
    len: usize,
) -> Result<()> {
    if populate(name, memory, offset, len)? {
        return Ok(());
    }
    loop {
        match fallocate(fd, FallocateFlags::empty(), offset as libc::off_t, len as libc::off_t) {
            Err(Errno::EINTR) => {}
            done => return done.map_err(|errno| shortage(name, len, errno)),
        }
    }
}

/// As [`reserve`], without the descriptor. `false`, and nothing is reserved: this kernel cannot do it (Linux older than
/// 5.14).
pub fn populate(name: &str, memory: &SharedMemory, offset: usize, len: usize) -> Result<bool> {
    assert!(offset + len <= memory.len, "a reservation past the end of shared memory");
    if len == 0 {
        return Ok(true);
    }
    let page = page_size();
    let pages = offset / page * page..(offset + len).next_multiple_of(page).min(memory.len);
    loop {
        // SAFETY: the range lies within the mapping; populating it does not change its contents.
        let done =
            unsafe { libc::madvise(memory.at(pages.start).cast(), pages.len(), libc::MADV_POPULATE_WRITE) };
        match Errno::result(done) {
            Ok(_) => return Ok(true),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(Errno::EINVAL) => return Ok(false),
            Err(errno) => return Err(shortage(name, len, errno)),
        }
    }
}

fn shortage(name: &str, len: usize, errno: Errno) -> Error {
    Error::system(format!("reserve {len} bytes of shared memory for {name}"), errno)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    // SAFETY: an atomic integer.
    unsafe impl Shared for AtomicU32 {}

    #[test]
    fn two_mappings_share_memory() {
        let (ours, fd) = SharedMemory::create("test", 8192).unwrap();
        let theirs = SharedMemory::open("test", fd.as_fd(), 8192).unwrap();
        ours.view::<AtomicU32>(4096).store(7, Ordering::Relaxed);
        assert_eq!(theirs.view::<AtomicU32>(4096).load(Ordering::Relaxed), 7);
    }

    #[test]
    fn unsealed_wrong_sized_and_foreign_descriptors_are_rejected() {
        let (_ours, fd) = SharedMemory::create("test", 4096).unwrap();
        let error = SharedMemory::open("arena of rank 3", fd.as_fd(), 8192).unwrap_err();
        assert!(error.to_string().contains("4096 bytes instead of 8192"), "{error}");
        let unsealed = memfd_create("x", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        let error = SharedMemory::open("arena of rank 3", unsealed.as_fd(), 4096).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(SharedMemory::open("arena", file.as_fd(), 4096).is_err());
    }

    #[test]
    fn an_array_has_its_elements_one_behind_the_other() {
        let (memory, _fd) = SharedMemory::create("test", 4096).unwrap();
        let memory = Arc::new(memory);
        let array = SharedArray::<AtomicU32>::new(&memory, 4080, 4);
        array[3].store(7, Ordering::Relaxed);
        assert_eq!(memory.view::<AtomicU32>(4092).load(Ordering::Relaxed), 7);
        let panics =
            |access: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err();
        assert!(panics(&|| array[4].store(1, Ordering::Relaxed)), "an element past the end");
        assert!(panics(&|| drop(SharedArray::<AtomicU32>::new(&memory, 4080, 5))), "an array past the end");
        assert!(panics(&|| drop(SharedArray::<AtomicU32>::new(&memory, 2, 1))), "a misaligned array");
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn a_view_past_the_end_panics() {
        let (memory, _fd) = SharedMemory::create("test", 4096).unwrap();
        memory.view::<AtomicU32>(4094);
    }
}

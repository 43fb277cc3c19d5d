//! Arenas: shared memory of which every rank has a part, and that all ranks map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::CpuTransport;
use crate::comm::adopt::Adoption;
use crate::comm::buffer::{Arena, HUGE_PAGE};
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, bytes_of};
use crate::progress::Operation;
use crate::shm::{ReplacedPages, SharedMemory, page_size, reserve};
use crate::{Error, Result, memory};

const PAGE: usize = 4096;
/// Additional offset between the parts of adjacent ranks: the same elements of all ranks must not fall into the same
/// cache set.
const STAGGER: usize = 65 * 64;

/// Offsets of the parts of `ranks` ranks with `bytes` bytes each, and the total size. Large parts are aligned to huge
/// pages.
pub(in crate::comm) fn place_parts(ranks: usize, bytes: usize) -> (Vec<usize>, usize) {
    let part = bytes + ranks * STAGGER;
    let stride = part.next_multiple_of(if part >= HUGE_PAGE { HUGE_PAGE } else { PAGE });
    ((0..ranks).map(|rank| rank * stride + rank * STAGGER).collect(), stride * ranks)
}

/// Offsets of the parts of `ranks` ranks that replace pages of theirs, which contain `bytes` bytes of interest, and the total
/// size. Parts are whole pages. A stagger of an odd number of pages keeps the same elements of all ranks out of the same sets
/// of the L2 cache.
fn place_pages(ranks: usize, bytes: usize, page: usize) -> (Vec<usize>, usize) {
    // The first and the last page may be there for a few bytes each.
    let part = bytes.next_multiple_of(page) + 2 * page;
    let stride = part.next_multiple_of(if part >= HUGE_PAGE { HUGE_PAGE } else { page }) + 17 * page;
    ((0..ranks).map(|rank| rank * stride).collect(), stride * ranks)
}

pub(in crate::comm) fn one_descriptor(fds: Vec<OwnedFd>) -> Result<OwnedFd> {
    let count = fds.len();
    fds.into_iter().next().filter(|_| count == 1).ok_or_else(|| Error::Protocol {
        peer: "rank 0".into(),
        problem: format!("{count} descriptors where one is expected"),
    })
}

fn refusal(problem: String) -> Error {
    Error::InvalidArgument { operation: "allocate", problem }
}

impl CpuTransport {
    /// Allocates `len` elements for every rank.
    pub(super) fn allocate_arena(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = bytes_of(dtype, len)?;
        let (parts, total) = place_parts(self.size as usize, bytes);
        let own = parts[self.rank as usize];
        let prepare = |name: &str, memory: &SharedMemory, fd: BorrowedFd<'_>| {
            Ok(reserve(name, memory, fd, own, bytes)?)
        };
        let (arena, ()) = self.form_arena((dtype, len), &parts, total, prepare)?;
        Ok(Buffer::in_arena(arena, dtype, len))
    }

    /// Replaces this rank's own pages by its part of an arena.
    pub(super) fn replace_by_arena(&mut self, adoption: &Adoption<'_>) -> Result<(Buffer, ReplacedPages)> {
        let Adoption { dtype, len, starts, pages } = adoption;
        let (parts, total) = place_pages(self.size as usize, len * dtype.size(), page_size());
        let own = parts[self.rank as usize];
        let prepare = |name: &str, memory: &SharedMemory, fd: BorrowedFd<'_>| {
            reserve(name, memory, fd, own, pages.len.get())?;
            // SAFETY: the promise of the caller of `Communicator::adopt_in_place`.
            Ok(unsafe { memory.replace_pages(fd, own, pages.address, pages.len) }?)
        };
        let begins: Vec<usize> = parts.iter().zip(*starts).map(|(part, start)| part + start).collect();
        let (arena, replaced) = self.form_arena((*dtype, *len), &begins, total, prepare)?;
        Ok((Buffer::in_arena(arena, *dtype, *len), replaced))
    }

    /// Creates an arena of `total` bytes in which rank r's part of `len` elements begins at `parts[r]`. Every rank prepares
    /// its own part.
    fn form_arena<R>(
        &mut self,
        (dtype, len): (DType, usize),
        parts: &[usize],
        total: usize,
        prepare: impl FnOnce(&str, &SharedMemory, BorrowedFd<'_>) -> Result<R>,
    ) -> Result<(Arena, R)> {
        let call = Signature::plain(Operation::Allocate, dtype, len);
        self.enter(&call)?;
        self.arenas += 1;
        let name = format!("{}/arena-{}", self.key, self.arenas);
        let (memory, fd) = self.share_arena(&name, total)?;
        let prepared = prepare(&name, &memory, fd.as_fd())?;
        // A peer's part must not be touched before that rank has prepared it.
        self.enter(&call)?;
        memory.map_pages();
        let id = u64::from(self.number) << 32 | u64::from(self.arenas);
        let parts = self.members.world_ranks().iter().copied().zip(parts.iter().copied());
        let arena = Arena::new(memory, id, Arc::downgrade(&self.membership), &self.members, parts);
        Ok((arena, prepared))
    }

    /// Creates the memory on rank 0, if there is enough, and maps it on all ranks.
    fn share_arena(&self, name: &str, total: usize) -> Result<(SharedMemory, OwnedFd)> {
        let store = self.membership.store();
        if self.rank == 0 {
            if let Some(problem) = memory::shortage(total) {
                let problem =
                    format!("{problem}, {} for each of {} ranks", total / self.size as usize, self.size);
                store.set(name, problem.as_bytes(), &[], self.size - 1)?;
                return Err(refusal(problem));
            }
            let (memory, fd) = SharedMemory::create(name, total)?;
            store.set(name, b"", &[fd.as_fd()], self.size - 1)?;
            return Ok((memory, fd));
        }
        let (problem, fds) = store.get(name, self.members.world_rank(0), self.timeout)?;
        if !problem.is_empty() {
            return Err(refusal(String::from_utf8_lossy(&problem).into_owned()));
        }
        let fd = one_descriptor(fds)?;
        Ok((SharedMemory::open(name, fd.as_fd(), total)?, fd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_within_the_arena() {
        for ranks in [2, 3, 9, 64] {
            for bytes in [0, 1, 4096, 100_000, HUGE_PAGE, (5 << 20) + 7] {
                let (parts, total) = place_parts(ranks, bytes);
                assert!(parts.windows(2).all(|pair| pair[0] + bytes <= pair[1]));
                assert!(parts[ranks - 1] + bytes <= total);
                assert!(parts.iter().all(|part| part % 64 == 0));
                let (parts, total) = place_pages(ranks, bytes, PAGE);
                let most = bytes.next_multiple_of(PAGE) + PAGE;
                assert!(parts.windows(2).all(|pair| pair[0] + most <= pair[1]));
                assert!(parts[ranks - 1] + most <= total);
                assert!(parts.iter().chain([&total]).all(|part| part % PAGE == 0));
            }
        }
    }
}

//! Memory in which every rank has a part and that every rank maps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::CpuTransport;
use crate::comm::buffer::{Arena, HUGE_PAGE};
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, bytes_of};
use crate::progress::Operation;
use crate::shm::{SharedMemory, reserve};
use crate::{Error, Result, memory};

const PAGE: usize = 4096;
/// Offset between the parts of neighbouring ranks beyond their alignment: equal elements of all ranks must not
/// fall into the same cache set.
const STAGGER: usize = 65 * 64;

/// Where the parts of `ranks` ranks of `bytes` bytes each begin, and the size of the whole. Parts are aligned to huge
/// pages once they fill one.
fn place_parts(ranks: usize, bytes: usize) -> (Vec<usize>, usize) {
    let part = bytes + ranks * STAGGER;
    let stride = part.next_multiple_of(if part >= HUGE_PAGE { HUGE_PAGE } else { PAGE });
    ((0..ranks).map(|rank| rank * stride + rank * STAGGER).collect(), stride * ranks)
}

pub(super) fn one_descriptor(fds: Vec<OwnedFd>) -> Result<OwnedFd> {
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
    /// Memory for `len` elements of every rank.
    pub(super) fn allocate_arena(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = bytes_of(dtype, len)?;
        let call = Signature::plain(Operation::Allocate, dtype, len);
        self.enter(&call)?;
        self.arenas += 1;
        let name = format!("{}/arena-{}", self.name, self.arenas);
        let (parts, total) = place_parts(self.size as usize, bytes);
        let (memory, fd) = self.share_arena(&name, total)?;
        reserve(&name, &memory, fd.as_fd(), parts[self.rank as usize], bytes)?;
        // Nobody touches a peer's part before that rank has reserved it.
        self.enter(&call)?;
        memory.map_pages();
        let id = u64::from(self.number) << 32 | u64::from(self.arenas);
        let arena = Arena { memory, id, owner: Arc::downgrade(&self.membership), parts, rank: self.rank };
        Ok(Buffer::in_arena(arena, dtype, len))
    }

    /// Makes the memory on rank 0, if the machine has enough, and maps it on all.
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
        let (problem, fds) = store.get(name, 0, self.timeout)?;
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
    fn parts_lie_apart_and_within() {
        for ranks in [2, 3, 9, 64] {
            for bytes in [0, 1, 4096, 100_000, HUGE_PAGE, (5 << 20) + 7] {
                let (parts, total) = place_parts(ranks, bytes);
                assert!(parts.windows(2).all(|pair| pair[0] + bytes <= pair[1]));
                assert!(parts[ranks - 1] + bytes <= total);
                assert!(parts.iter().all(|part| part % 64 == 0));
            }
        }
    }
}

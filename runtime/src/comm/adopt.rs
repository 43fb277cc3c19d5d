//! Memory of the program's own, made reachable for peers.
//!
//! Peers access an arena in place; any other memory is copied through shared memory in every operation. A program that
//! reduces the same memory again and again can avoid that: [`Communicator::adopt`] moves a vector into an arena once.
//! Memory at an address that another library has chosen, such as the gradients of a tensor library, is adopted in place by
//! [`Communicator::adopt_in_place`]: its whole pages are replaced by pages of an arena. What lies before its first and after
//! its last whole page on any rank, the *edges*, stays as it is and is copied.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use super::{Buffer, Communicator, DType, Element, ReduceOp};
use crate::shm::{ReplacedPages, is_private, page_size};
use crate::{Error, Result};

/// Below, an operation takes as long on private memory.
const MIN_BYTES: usize = 64 << 10;

/// What a transport replaces by an arena.
pub(crate) struct Adoption<'a> {
    pub(crate) dtype: DType,
    /// Elements that are in whole pages on all ranks.
    pub(crate) len: usize,
    /// The first byte of these elements within the pages, for each rank.
    pub(crate) starts: &'a [usize],
    /// This rank's pages.
    pub(crate) pages: Pages,
}

/// Whole pages of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pages {
    pub(crate) address: NonNull<u8>,
    pub(crate) len: NonZeroUsize,
}

/// The bytes of a range of memory before its first whole page and after its last one.
fn edges(base: usize, bytes: usize, page: usize) -> [usize; 2] {
    let head = base.next_multiple_of(page) - base;
    if head >= bytes { [bytes, 0] } else { [head, (base + bytes) % page] }
}

/// What a rank tells the others: the number of elements, whether its memory can be adopted, and its edges in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offer {
    len: usize,
    is_suitable: bool,
    edges: [usize; 2],
}

impl Offer {
    fn encode(self) -> [i64; 4] {
        [self.len as i64, self.is_suitable.into(), self.edges[0] as i64, self.edges[1] as i64]
    }

    fn decode(words: &[i64]) -> Self {
        let &[len, suitable, head, tail] = words else { unreachable!("four words for each rank") };
        Offer { len: len as usize, is_suitable: suitable == 1, edges: [head as usize, tail as usize] }
    }
}

/// The elements that are in whole pages on all ranks, if their memory can be adopted and they are worth it.
fn common_pages(offers: &[Offer], dtype: DType) -> Option<Range<usize>> {
    let most = |edge: usize| offers.iter().map(|offer| offer.edges[edge] / dtype.size()).max().unwrap_or(0);
    let begin = most(0);
    let end = offers.first()?.len.checked_sub(most(1))?;
    let is_worth_it = begin < end && (end - begin) * dtype.size() >= MIN_BYTES;
    (is_worth_it && offers.iter().all(|offer| offer.is_suitable)).then_some(begin..end)
}

impl Communicator {
    /// Moves the elements of a vector into memory that peers access in place. Collective, like
    /// [`allocate`](Self::allocate): all ranks pass vectors of the same length. `values` is empty afterwards, and unchanged
    /// after an error.
    ///
    /// ```
    /// # fn main() -> mgpu::Result<()> {
    /// let mut world = mgpu::World::from_env()?;
    /// let mut comm = world.communicator()?;
    /// let mut gradients = vec![1.5f32; 1000];
    /// let mut adopted = comm.adopt(&mut gradients)?;
    /// for _ in 0..3 {
    ///     adopted = comm.all_reduce(adopted, mgpu::ReduceOp::Avg)?.wait()?;
    /// }
    /// gradients = adopted.as_slice().to_vec();
    /// assert_eq!(gradients[999], 1.5);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn adopt<T: Element>(&mut self, values: &mut Vec<T>) -> Result<Buffer> {
        let mut buffer = self.allocate(T::DTYPE, values.len())?;
        buffer.as_mut_slice::<T>().copy_from_slice(values);
        *values = Vec::new();
        Ok(buffer)
    }

    /// Makes `len` elements of `dtype` from `base` on, memory of the caller's own, reachable for peers without moving it.
    /// Collective: all ranks pass as many elements of the same type.
    ///
    /// The whole pages become shared memory with the same contents, until the result is dropped; then they become private
    /// again, with what they contain. A child that this process forks meanwhile shares them. If the memory of any rank cannot
    /// be adopted (a mapped file, a stack, less than 64 KiB, a kernel that does not tell what the memory is), or ranks do not
    /// share memory, nothing is replaced, and operations copy as for any private buffer: [`AdoptedMemory::is_in_place`].
    ///
    /// # Safety
    /// Until the result is dropped:
    /// - The memory stays allocated: it is not freed, unmapped or moved (`realloc`). Leaking the result means never to free it.
    /// - All its elements are initialised, and no reference to them is used during an operation.
    /// - No device and no I/O of the kernel refers to its physical pages (page-locked memory of CUDA, RDMA, `io_uring`).
    ///
    /// During this call, and while the result is dropped, no other thread accesses the pages that contain it.
    ///
    /// # Errors
    /// If ranks pass different numbers of elements (nothing has changed then), if memory is short, or as in the
    /// [contract](super).
    ///
    /// # Panics
    /// If `base` is not aligned for the element type.
    pub unsafe fn adopt_in_place(
        &mut self,
        dtype: DType,
        base: NonNull<u8>,
        len: usize,
    ) -> Result<AdoptedMemory> {
        let (address, size, bytes, page) =
            (base.as_ptr() as usize, dtype.size(), super::bytes_of(dtype, len)?, page_size());
        assert!(address.is_multiple_of(size), "{base:?} is not aligned for {dtype}");
        let [head, tail] = edges(address, bytes, page);
        let at =
            |byte: usize| NonNull::new(base.as_ptr().wrapping_add(byte)).expect("memory of the caller's");
        let pages = NonZeroUsize::new(bytes - head - tail).map(|len| Pages { address: at(head), len });
        let is_suitable = pages.is_some_and(|pages| is_private(pages.address, pages.len.get()));
        let own = Offer { len, is_suitable, edges: [head, tail] };
        let offers: Vec<Offer> = self.all_gather_slice(&own.encode())?.chunks(4).map(Offer::decode).collect();
        if let Some(rank) = offers.iter().position(|offer| offer.len != len) {
            let problem = format!(
                "this rank passes {len} elements and rank {} passes {}; all ranks must pass as many",
                self.world_rank(rank as u32),
                offers[rank].len
            );
            return Err(Error::InvalidArgument { operation: "adopt_in_place", problem });
        }
        // SAFETY: the caller's promise; the parts do not overlap.
        let part =
            |range: Range<usize>| unsafe { Buffer::from_raw(at(range.start * size), dtype, range.len()) };
        let (common, pages) = match (common_pages(&offers, dtype), pages) {
            (Some(common), Some(pages)) if self.replaces_pages() => (common, pages),
            _ => {
                let edges = [part(0..0), part(len..len)];
                return Ok(AdoptedMemory::new(dtype, edges, part(0..len), None));
            }
        };
        let starts: Vec<usize> = offers.iter().map(|offer| common.start * size - offer.edges[0]).collect();
        let adoption = Adoption { dtype, len: common.len(), starts: &starts, pages };
        let (middle, replaced) = self.adopt_pages(&adoption)?;
        let edges = [part(0..common.start), part(common.end..len)];
        Ok(AdoptedMemory::new(dtype, edges, middle, Some(replaced)))
    }
}

/// Memory of the caller's own, whose whole pages peers access in place. See [`Communicator::adopt_in_place`].
///
/// Dropping it makes the pages private again, also after an operation that failed; the contents are unspecified then.
#[derive(Debug)]
pub struct AdoptedMemory {
    /// What lies before and after the elements that are in whole pages on all ranks.
    edges: [Buffer; 2],
    /// Both edges, for operations on them.
    edge_copy: Option<Buffer>,
    /// The elements in whole pages, or all elements if nothing was replaced. `None` after an operation on them failed.
    middle: Option<Buffer>,
    replaced: Option<ReplacedPages>,
}

impl AdoptedMemory {
    fn new(dtype: DType, edges: [Buffer; 2], middle: Buffer, replaced: Option<ReplacedPages>) -> Self {
        let edge_copy = Buffer::zeroed_of(dtype, edges[0].len() + edges[1].len());
        AdoptedMemory { edges, edge_copy: Some(edge_copy), middle: Some(middle), replaced }
    }

    /// Whether peers access the whole pages in place. Otherwise operations copy.
    pub fn is_in_place(&self) -> bool {
        self.replaced.is_some()
    }

    /// All-reduce: the memory becomes the reduction of all ranks' memory.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce(&mut self, comm: &mut Communicator, op: ReduceOp) -> Result<()> {
        self.each_part(|buffer| comm.all_reduce(buffer, op)?.wait())
    }

    /// Broadcast: the memory becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`].
    pub fn broadcast(&mut self, comm: &mut Communicator, root: u32) -> Result<()> {
        self.each_part(|buffer| comm.broadcast(buffer, root)?.wait())
    }

    /// Reduce: the memory of rank `root` becomes the reduction of all ranks' memory.
    ///
    /// # Errors
    /// As [`Communicator::reduce`].
    pub fn reduce(&mut self, comm: &mut Communicator, op: ReduceOp, root: u32) -> Result<()> {
        self.each_part(|buffer| comm.reduce(buffer, op, root)?.wait())
    }

    /// Runs an operation on the edges, if there are any, and then on the rest. Their lengths are the same on all ranks.
    fn each_part(&mut self, mut operation: impl FnMut(Buffer) -> Result<Buffer>) -> Result<()> {
        let lost = || Error::InvalidArgument {
            operation: "adopt_in_place",
            problem: "an operation on this memory has failed; drop it to get the memory back".into(),
        };
        let mut copy = self.edge_copy.take().ok_or_else(lost)?;
        let middle = self.middle.take().ok_or_else(lost)?;
        let head = self.edges[0].len();
        if !copy.is_empty() {
            copy.copy_from(0, &self.edges[0], 0..head);
            copy.copy_from(head, &self.edges[1], 0..self.edges[1].len());
            copy = operation(copy)?;
            self.edges[0].copy_from(0, &copy, 0..head);
            let tail = head..copy.len();
            self.edges[1].copy_from(0, &copy, tail);
        }
        self.edge_copy = Some(copy);
        self.middle = Some(operation(middle)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_what_is_not_in_whole_pages() {
        for (base, bytes, expected) in [
            (0, 8192, [0, 0]),
            (64, 8192, [4032, 64]),
            (4032, 128, [64, 64]),
            (4032, 64, [64, 0]),
            (100, 40, [40, 0]),
            (8192, 40, [0, 40]),
            (8192, 0, [0, 0]),
            (100, 0, [0, 0]),
        ] {
            assert_eq!(edges(base, bytes, 4096), expected, "{bytes} bytes at {base}");
        }
    }

    #[test]
    fn only_what_is_in_whole_pages_on_all_ranks_is_common() {
        let offer = |edges| Offer { len: 100_000, is_suitable: true, edges };
        let offers = [offer([4032, 64]), offer([16, 4080])];
        assert_eq!(common_pages(&offers, DType::F32), Some(1008..98_980));
        assert_eq!(common_pages(&[offer([0, 0])], DType::F32), Some(0..100_000));
        let unsuitable = Offer { is_suitable: false, ..offers[0] };
        assert_eq!(common_pages(&[offers[1], unsuitable], DType::F32), None);
        // Less than 64 KiB, and nothing at all.
        let small = |len, edges| [Offer { len, is_suitable: true, edges }];
        assert_eq!(common_pages(&small(16_383, [0, 0]), DType::F32), None);
        assert_eq!(common_pages(&small(16_384, [0, 0]), DType::F32), Some(0..16_384));
        assert_eq!(common_pages(&small(3, [12, 16]), DType::F32), None);
    }

    #[test]
    fn offers_survive_the_exchange() {
        for is_suitable in [true, false] {
            let offer = Offer { len: 7, is_suitable, edges: [4032, 1] };
            assert_eq!(Offer::decode(&offer.encode()), offer);
        }
    }
}

//! Collectives on slices instead of buffers.

use std::ptr::NonNull;

use super::exchange::Partition;
use super::{Buffer, Communicator, DType, Element, ReduceOp, bytes_of};
use crate::Result;

/// Conveniences for slices.
impl Communicator {
    /// All-reduces a slice in place.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn all_reduce_slice<T: Element>(&mut self, values: &mut [T], op: ReduceOp) -> Result<()> {
        self.on_slice(values, |comm, buffer| comm.all_reduce(buffer, op)?.wait())
    }

    /// Runs an operation in place on a slice, or on a copy of it if the transport may use the memory for longer.
    fn on_slice<T: Element>(
        &mut self,
        values: &mut [T],
        operation: impl FnOnce(&mut Self, Buffer) -> Result<Buffer>,
    ) -> Result<()> {
        if !self.releases_memory() {
            let result = operation(self, Buffer::from_slice(values))?;
            values.copy_from_slice(result.as_slice());
            return Ok(());
        }
        let base = NonNull::from(&mut *values).cast();
        // SAFETY: the slice is borrowed until the operation has returned; then the transport does not use it any more.
        let buffer = unsafe { Buffer::from_raw(base, T::DTYPE, values.len()) };
        operation(self, buffer).map(drop)
    }

    /// Replaces a slice by that of rank `root`.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn broadcast_slice<T: Element>(&mut self, values: &mut [T], root: u32) -> Result<()> {
        self.on_slice(values, |comm, buffer| comm.broadcast(buffer, root)?.wait())
    }

    /// Gathers the values of all ranks, in rank order. All ranks pass the same number of values.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn all_gather_slice<T: Element>(&mut self, values: &[T]) -> Result<Vec<T>> {
        let mut all = Buffer::zeroed::<T>(values.len() * self.size() as usize);
        let begin = values.len() * self.rank() as usize;
        all.as_mut_slice::<T>()[begin..begin + values.len()].copy_from_slice(values);
        Ok(self.all_gather(all)?.wait()?.as_slice().to_vec())
    }

    /// Gathers the bytes of all ranks, in rank order; each rank may pass a different number. For serialised objects.
    ///
    /// ```
    /// let mut world = mgpu::World::from_env()?;
    /// let mut comm = world.communicator()?;
    /// let names = comm.all_gather_bytes(format!("rank {}", comm.rank()).as_bytes())?;
    /// assert_eq!(names[0], b"rank 0");
    /// # Ok::<(), mgpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::all_gather_v`].
    pub fn all_gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lens = self.all_gather_slice(&[bytes.len() as i64])?;
        let counts: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
        let parts = Partition::Counts(&counts);
        let mut all = Buffer::zeroed_of(DType::U8, total(&counts)?);
        all.as_mut_slice::<u8>()[parts.range(self.rank())].copy_from_slice(bytes);
        let all = self.all_gather_v(all, &counts)?.wait()?;
        Ok((0..self.size()).map(|rank| all.as_slice::<u8>()[parts.range(rank)].to_vec()).collect())
    }

    /// Broadcasts the bytes of rank `root`. The arguments of the other ranks are ignored.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn broadcast_bytes(&mut self, bytes: &[u8], root: u32) -> Result<Vec<u8>> {
        let mut len = [bytes.len() as i64];
        self.broadcast_slice(&mut len, root)?;
        let mut all = Buffer::zeroed_of(DType::U8, total(&[len[0] as usize])?);
        if self.rank() == root {
            all.as_mut_slice().copy_from_slice(bytes);
        }
        Ok(self.broadcast(all, root)?.wait()?.as_slice().to_vec())
    }
}

/// Sum of the ranks' counts, checked against the largest buffer.
fn total(counts: &[usize]) -> Result<usize> {
    let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count)).unwrap_or(usize::MAX);
    bytes_of(DType::U8, total)
}

//! Memory that ranks access in place. Programs pass addresses, so the library keeps a table of what it has allocated: an
//! operation on an address within one of these arenas needs no copy.
//!
//! The table is one for the process and is never dropped, because a program may still use the memory after it has left the
//! run.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;

use mgpu::{Buffer, DType};

use crate::call::{Result, borrow, call, lock, put};
use crate::communicator::CommunicatorHandle;
use crate::status::{Failure, Status};

/// The arenas, by address. Each is a buffer of bytes.
pub(crate) struct Arenas(Mutex<BTreeMap<usize, Buffer>>);

/// Those of the process.
pub(crate) static ARENAS: Arenas = Arenas::new();

impl Arenas {
    const fn new() -> Self {
        Arenas(Mutex::new(BTreeMap::new()))
    }

    /// The buffer of `len` elements at `data`, in place if it is within an arena, else as private memory.
    ///
    /// # Safety
    /// As [`Buffer::from_raw`]; `data` may be null if there are no elements.
    pub(crate) unsafe fn buffer(&self, data: *mut c_void, dtype: DType, len: usize) -> Result<Buffer> {
        let (address, size) = (data as usize, dtype.size());
        let bytes = len
            .checked_mul(size)
            .filter(|bytes| *bytes <= isize::MAX as usize && address.checked_add(*bytes).is_some())
            .ok_or_else(|| {
                Failure::argument(format!("{len} elements of {dtype} are more than any memory"))
            })?;
        if !address.is_multiple_of(size) {
            let text =
                format!("`data` at {address:#x} is not aligned to an element of {dtype}, {size} bytes");
            return Err(Failure::argument(text));
        }
        if let Some((begin, arena)) = lock(&self.0)?.range(..=address).next_back()
            && address < begin + arena.bytes()
        {
            if address + bytes > begin + arena.bytes() {
                return Err(Failure::argument(format!(
                    "{bytes} bytes at byte {} of memory of mgpu_allocate, which has {}",
                    address - begin,
                    arena.bytes()
                )));
            }
            // SAFETY: within the arena, and aligned; the rest is the caller's promise.
            return Ok(unsafe { arena.alias(address - begin, dtype, len) });
        }
        let base = match NonNull::new(data.cast::<u8>()) {
            Some(base) => base,
            None if len == 0 => NonNull::<u64>::dangling().cast(),
            None => return Err(Failure::argument("`data` is null")),
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { Buffer::from_raw(base, dtype, len) })
    }

    /// Adds an arena, and returns its address.
    fn add(&self, mut arena: Buffer) -> Result<*mut c_void> {
        let data = arena.as_mut_slice::<u8>().as_mut_ptr();
        lock(&self.0)?.insert(data as usize, arena);
        Ok(data.cast())
    }

    fn remove(&self, data: *mut c_void) -> Result<()> {
        let removed = lock(&self.0)?.remove(&(data as usize));
        removed.map(|_| ()).ok_or_else(|| {
            Failure::argument(format!("`data` at {data:p} is not an address that mgpu_allocate has returned"))
        })
    }
}

/// Allocates `bytes` zeroed bytes that the other ranks access in place: operations on them are fastest. In an operation either
/// all ranks pass the same part of the same allocation, or all pass memory of their own; anything else is a mismatch.
/// Collective. At least one byte is allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_allocate(
    comm: *mut CommunicatorHandle,
    bytes: usize,
    data: *mut *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(data, "data", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let comm = unsafe { borrow(comm, "comm")? };
        let arena = comm.lock()?.allocate(DType::U8, bytes.max(1))?;
        let address = ARENAS.add(arena)?;
        // SAFETY: the header's rules.
        unsafe { put(data, "data", address) }
    })
}

/// Frees memory of `mgpu_allocate`. Not collective. Null is ignored. Memory that is not freed stays valid until the process
/// ends, also after `mgpu_finalize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_free(data: *mut c_void) -> Status {
    call(|| if data.is_null() { Ok(()) } else { ARENAS.remove(data) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_within_an_arena_are_used_in_place() {
        let arenas = Arenas::new();
        let arena = arenas.add(Buffer::zeroed::<u8>(64)).unwrap();
        // SAFETY: the buffers are not accessed at the same time, and nothing is read at invalid addresses.
        unsafe {
            let mut part = arenas.buffer(arena.cast::<u8>().add(16).cast(), DType::F32, 12).unwrap();
            part.as_mut_slice::<f32>()[11] = 1.0;
            assert_eq!(arena.cast::<f32>().add(15).read(), 1.0);
            let refused = |data, len| arenas.buffer(data, DType::F32, len).is_err();
            assert!(refused(arena.cast::<u8>().add(16).cast(), 13), "beyond the arena");
            assert!(refused(arena.cast::<u8>().add(17).cast(), 1), "not aligned");
            assert!(refused(std::ptr::null_mut(), 1) && refused(arena, usize::MAX));
            let mut own = [1.5f32; 4];
            let buffer = arenas.buffer(own.as_mut_ptr().cast(), DType::F32, 4).unwrap();
            assert_eq!(buffer.as_slice::<f32>(), [1.5; 4]);
            assert!(arenas.buffer(std::ptr::null_mut(), DType::F64, 0).unwrap().is_empty());
        }
        assert!(arenas.remove(arena.cast::<u8>().wrapping_add(8).cast()).is_err());
        arenas.remove(arena).unwrap();
        assert!(arenas.remove(arena).is_err());
    }
}

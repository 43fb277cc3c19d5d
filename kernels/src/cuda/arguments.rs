//! The arguments and the grid of a kernel launch.

use super::View;

/// The number of threads that run a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block, in one dimension.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Grid { blocks: [blocks, 1, 1], threads, shared: 0 }
    }

    /// As many blocks of `threads` threads as give each of `items` items a thread, but at most `most`: a kernel with
    /// a grid-stride loop needs no more threads than fill the GPU.
    pub fn cover(items: usize, threads: u32, most: u32) -> Self {
        let blocks = items.div_ceil(threads as usize).clamp(1, most as usize);
        Grid::new(blocks as u32, threads)
    }
}

/// One argument of a kernel, passed by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A device address, and how many bytes the kernel reads or writes there.
    Address(u64, u64),
    /// `u32`.
    U32(u32),
    /// `i32`.
    I32(i32),
    /// `u64`.
    U64(u64),
    /// `f32`.
    F32(f32),
    /// `f64`.
    F64(f64),
    /// A structure with the memory layout of C, at most 128 bytes; and how many bytes the kernel reads or writes at
    /// addresses in it.
    Struct([u64; 16], u64),
}

impl Arg {
    /// A structure that is `repr(C)` here and has the same members in the kernel.
    ///
    /// # Panics
    /// If it is larger than 128 bytes.
    pub fn of<T: bytemuck::NoUninit>(value: &T) -> Self {
        let mut words = [0u64; 16];
        let bytes = bytemuck::bytes_of(value);
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Arg::Struct(words, 0)
    }

    /// The same structure, at whose addresses the kernel reads or writes so many bytes ([`Launch`](super::Launch)).
    #[must_use]
    pub fn moving(self, bytes: usize) -> Self {
        match self {
            Arg::Struct(words, _) => Arg::Struct(words, bytes as u64),
            other => other,
        }
    }

    /// The address of a view that the kernel reads and writes.
    pub fn updated(view: View<'_>) -> Self {
        Arg::Address(view.address(), 2 * view.bytes() as u64)
    }

    /// How many bytes the kernel reads or writes at the argument's addresses.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Arg::Address(_, bytes) | Arg::Struct(_, bytes) => *bytes,
            _ => 0,
        }
    }

    /// The address of the value. The driver reads as many bytes from it as the kernel's parameter has.
    pub(super) fn pointer(&self) -> *mut std::ffi::c_void {
        let pointer: *const u8 = match self {
            Arg::Address(value, _) | Arg::U64(value) => std::ptr::from_ref(value).cast(),
            Arg::U32(value) => std::ptr::from_ref(value).cast(),
            Arg::I32(value) => std::ptr::from_ref(value).cast(),
            Arg::F32(value) => std::ptr::from_ref(value).cast(),
            Arg::F64(value) => std::ptr::from_ref(value).cast(),
            Arg::Struct(words, _) => words.as_ptr().cast(),
        };
        pointer.cast_mut().cast()
    }
}

impl From<View<'_>> for Arg {
    fn from(view: View<'_>) -> Self {
        Arg::Address(view.address(), view.bytes() as u64)
    }
}

/// A view, or null for `None`.
impl From<Option<View<'_>>> for Arg {
    fn from(view: Option<View<'_>>) -> Self {
        view.map_or(Arg::Address(0, 0), Arg::from)
    }
}

macro_rules! from_number {
    ($($number:ty => $variant:ident),*) => {$(
        impl From<$number> for Arg {
            fn from(value: $number) -> Self {
                Arg::$variant(value)
            }
        }
    )*};
}

from_number!(u32 => U32, i32 => I32, u64 => U64, f32 => F32, f64 => F64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_covers_its_items_with_at_most_the_given_blocks() {
        assert_eq!(Grid::cover(1000, 256, 100), Grid::new(4, 256));
        assert_eq!(Grid::cover(0, 256, 100), Grid::new(1, 256));
        assert_eq!(Grid::cover(1 << 40, 256, 100), Grid::new(100, 256));
    }

    #[test]
    fn a_structure_keeps_its_bytes() {
        let Arg::Struct(words, 0) = Arg::of(&[1u32, 2, 3]) else { panic!("a structure") };
        assert_eq!(words[..2], [1 | 2 << 32, 3]);
    }
}

//! Structs that programs pass. The first field of each is its size in bytes, as the program was compiled, so that a later
//! version of the library can append fields: a field that the program does not know keeps its default, and one that the
//! library does not know must be zero.

use crate::call::Result;
use crate::status::Failure;

/// No version of a struct is larger, in bytes.
pub(crate) const LARGEST: usize = 1 << 12;

/// A struct whose first field is its size.
///
/// # Safety
/// `repr(C)`, begins with a `usize`, consists of plain numbers, and has no padding.
pub(crate) unsafe trait SizedStruct: Copy {
    /// The name, for errors.
    const NAME: &'static str;
    /// Its size in the first version of the interface.
    const FIRST_SIZE: usize;
}

/// The size that the program has stored in the struct.
///
/// # Safety
/// The pointer is null, or refers to a struct of that size.
unsafe fn size_of_program<T: SizedStruct>(pointer: *const T) -> Result<usize> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("the {} is null", T::NAME)));
    }
    // SAFETY: the first field.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if size < T::FIRST_SIZE || size > LARGEST {
        return Err(Failure::argument(format!(
            "struct_size of the {} is {size}: set it to the sizeof of the struct, at least {}",
            T::NAME,
            T::FIRST_SIZE
        )));
    }
    Ok(size)
}

/// Reads a struct; fields that the program does not know are those of `default`.
///
/// # Safety
/// The pointer is null, or refers to a struct of the size that it says.
pub(crate) unsafe fn read<T: SizedStruct>(pointer: *const T, default: T) -> Result<T> {
    // SAFETY: the caller's promise.
    let size = unsafe { size_of_program(pointer)? };
    let known = size.min(size_of::<T>());
    // SAFETY: as many bytes as the program's struct has.
    let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
    if bytes[known..].iter().any(|byte| *byte != 0) {
        return Err(Failure::argument(format!(
            "the {} sets a field that this version of the library does not know: use a newer library",
            T::NAME
        )));
    }
    let mut value = default;
    // SAFETY: at most the size of the struct, which consists of plain numbers.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast::<u8>(), known) };
    Ok(value)
}

/// Writes as much of `value` as the program's struct has room for, and leaves its size.
///
/// # Safety
/// As [`read`]; the struct may be written to.
pub(crate) unsafe fn write<T: SizedStruct>(pointer: *mut T, value: &T) -> Result<()> {
    // SAFETY: the caller's promise.
    let size = unsafe { size_of_program(pointer)? };
    let skip = size_of::<usize>();
    let known = size.min(size_of::<T>()) - skip;
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: both structs have as many bytes after their first field.
    unsafe { std::ptr::copy_nonoverlapping(from.add(skip), pointer.cast::<u8>().add(skip), known) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Now {
        size: usize,
        first: u32,
        second: u32,
        third: u64,
    }

    // SAFETY: as required.
    unsafe impl SizedStruct for Now {
        const NAME: &'static str = "test";
        const FIRST_SIZE: usize = 16;
    }

    const DEFAULT: Now = Now { size: size_of::<Now>(), first: 1, second: 2, third: 3 };

    #[test]
    fn older_and_newer_programs_are_understood() {
        let older = Now { size: 16, first: 7, second: 8, third: 99 };
        // SAFETY: all structs have the sizes that they say.
        unsafe {
            let read_older = read(&older, DEFAULT).unwrap();
            assert_eq!((read_older.first, read_older.second, read_older.third), (7, 8, 3));
            let mut written = older;
            write(&mut written, &DEFAULT).unwrap();
            assert_eq!(written, Now { size: 16, first: 1, second: 2, third: 99 });
            let mut newer = [32usize, 5, 6, 0];
            assert_eq!(read(newer.as_ptr().cast(), DEFAULT).unwrap().third, 6);
            newer[3] = 1;
            assert!(read::<Now>(newer.as_ptr().cast(), DEFAULT).is_err());
            for size in [0, 8, 15, usize::MAX] {
                assert!(read(&Now { size, ..older }, DEFAULT).is_err());
            }
            assert!(read(std::ptr::null(), DEFAULT).is_err());
        }
    }
}

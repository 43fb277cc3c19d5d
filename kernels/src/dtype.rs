//! Element types that every backend can reduce and move.

use half::{bf16, f16};

/// The element types of buffers and collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16; reductions accumulate in `f32` and round once.
    F16 = 2,
    /// bfloat16; reductions accumulate in `f32` and round once.
    Bf16 = 3,
    /// Two's complement 32-bit integer.
    I32 = 4,
    /// Two's complement 64-bit integer.
    I64 = 5,
    /// Unsigned byte.
    U8 = 6,
}

impl DType {
    /// All element types, in the order of their numbers.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::I32, DType::I64, DType::U8];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }

    /// The name used on command lines and in messages: `f32`, `bf16`, …
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| {
            let known = DType::ALL.map(DType::name).join(", ");
            format!("unknown element type `{text}`; known are {known}")
        })
    }
}

/// A Rust type that is the element of a buffer.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8);

//! The precision of products, and the type that stores activations.

use crate::DType;

/// Arithmetic of convolutions and dense layers. Parameters, their gradients and the optimizer are f32 in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// Activations in f32; products of operands rounded to TF32 (10 bits of mantissa), summed in f32.
    Tf32,
    /// Activations in bfloat16 (7 bits of mantissa); products summed in f32.
    Bf16,
    /// Activations in IEEE 754's binary16 (10 bits of mantissa, 5 of exponent); products summed in f32. Gradients need a
    /// [loss scale](crate::loss_scale).
    F16,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16];

    /// Element type of activations.
    pub const fn storage(self) -> DType {
        match self {
            Precision::F32 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }

    /// Whether activations take half the memory of f32.
    pub const fn is_half(self) -> bool {
        self.storage().size() == 2
    }

    /// The name used on command lines: `f32`, `tf32`, `bf16` or `fp16`.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "fp16",
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Precision::ALL.into_iter().find(|precision| precision.name() == text);
        found.ok_or_else(|| "known are f32, tf32, bf16 and fp16".into())
    }
}

//! An algorithm of a library: its id in the library, and its names in logs and in the cache.

/// The library of an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LibraryName {
    CuDnn,
    CublasLt,
}

impl std::fmt::Display for LibraryName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LibraryName::CuDnn => "cuDNN",
            LibraryName::CublasLt => "cuBLASLt",
        })
    }
}

/// What an algorithm does besides the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Nothing.
    Plain,
    /// Adds the bias and applies the activation.
    Fused,
    /// Computes a result in bfloat16 that is then widened to f32.
    Narrow,
    /// Computes a convolution as the gradient of the input of another one, or the other way round, with flipped
    /// weights.
    Transposed,
}

impl Form {
    const ALL: [Form; 4] = [Form::Plain, Form::Fused, Form::Narrow, Form::Transposed];

    /// The name used in reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Form::Plain => "plain",
            Form::Fused => "fused",
            Form::Narrow => "narrow",
            Form::Transposed => "transposed",
        }
    }
}

/// One algorithm of a library for a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LibraryAlgorithm {
    of: LibraryName,
    /// cuDNN: its number, the number of parts of the batch if there are several, and zeros. cuBLASLt: its 64 opaque
    /// bytes.
    pub(crate) id: [u64; 8],
    pub(crate) form: Form,
}

impl LibraryAlgorithm {
    pub(crate) fn cudnn(number: u32, form: Form) -> Self {
        LibraryAlgorithm { of: LibraryName::CuDnn, id: [number.into(), 0, 0, 0, 0, 0, 0, 0], form }
    }

    /// As [`cudnn`](Self::cudnn), with the batch split into equal parts that are computed one after the other.
    pub(crate) fn cudnn_in_parts(number: u32, form: Form, parts: usize) -> Self {
        LibraryAlgorithm { of: LibraryName::CuDnn, id: [number.into(), parts as u64, 0, 0, 0, 0, 0, 0], form }
    }

    /// Number of parts of the batch that are computed one after the other.
    pub(crate) fn parts(&self) -> usize {
        match self.of {
            LibraryName::CuDnn => self.id[1].max(1) as usize,
            LibraryName::CublasLt => 1,
        }
    }

    pub(crate) fn cublaslt(id: [u64; 8], form: Form) -> Self {
        LibraryAlgorithm { of: LibraryName::CublasLt, id, form }
    }

    /// Text without white space that [`decode`](Self::decode) reads again, for this version of the library.
    pub(crate) fn encode(&self) -> String {
        let words = self.id.map(|word| format!("{word:x}"));
        format!("{}/{}/{}", self.of, words.join("."), self.form as u8)
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let [library, id, form] = text.split('/').collect::<Vec<_>>().try_into().ok()?;
        let library = [LibraryName::CuDnn, LibraryName::CublasLt]
            .into_iter()
            .find(|known| library == known.to_string())?;
        let words: Option<Vec<_>> = id.split('.').map(|word| u64::from_str_radix(word, 16).ok()).collect();
        let form = Form::ALL.into_iter().find(|known| form.parse() == Ok(*known as u8))?;
        Some(LibraryAlgorithm { of: library, id: words?.try_into().ok()?, form })
    }
}

impl std::fmt::Display for LibraryAlgorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.of {
            LibraryName::CuDnn => write!(f, "cuDNN {}", self.id[0])?,
            LibraryName::CublasLt => {
                // The bytes have no name; these digits identify them.
                let digest = self.id.iter().fold(0u64, |digest, word| {
                    (digest.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
                });
                write!(f, "cuBLASLt {:04x}", digest >> 48)?;
            }
        }
        f.write_str(match self.form {
            Form::Plain => "",
            Form::Fused => " fused",
            Form::Narrow => " bf16",
            Form::Transposed => " transposed",
        })?;
        if self.parts() > 1 { write!(f, " in {} parts", self.parts()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_survives_encode_and_decode() {
        for form in Form::ALL {
            let opaque = LibraryAlgorithm::cublaslt([0, 1, u64::MAX, 3, 4, 5, 6, 1 << 63], form);
            for algorithm in
                [LibraryAlgorithm::cudnn(6, form), LibraryAlgorithm::cudnn_in_parts(1, form, 4), opaque]
            {
                assert_eq!(LibraryAlgorithm::decode(&algorithm.encode()), Some(algorithm));
            }
        }
        let broken = ["fused", "cuDNN/6/0", "cuDNN/6.0.0.0.0.0.0.0/4", "cuFFT/6.0.0.0.0.0.0.0/0"];
        for text in broken {
            assert_eq!(LibraryAlgorithm::decode(text), None, "{text}");
        }
    }
}

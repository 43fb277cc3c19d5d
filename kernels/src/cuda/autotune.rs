//! Autotuning: selects the fastest algorithm for a pass by benchmarking, and caches the selection.
//!
//! The libraries have several algorithms for the same product, and this crate has a kernel of its own; which is the
//! fastest depends on the shape, the GPU and the versions. So all candidates are verified and benchmarked when a
//! layer is set up ([`super::trial`]), on memory filled with random numbers. A candidate that fails, or whose results
//! differ from those of a plain kernel, is rejected: a library that does not support a combination of types costs
//! speed, but never makes a run fail. The crate's own kernel is verified like any other.
//!
//! The selection is written to the cache of compiled kernels, so that the next run computes with the same algorithms and
//! therefore with the same rounding. When several ranks tune at the same time, the first one to write decides for all.

use super::algorithm::LibraryAlgorithm;
use super::error::Result;
use super::{Device, Source, View, cache};
use crate::Precision;

/// Which algorithms a layer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutotuneOptions {
    /// Only algorithms whose results are the same bits every time.
    pub deterministic: bool,
    /// Whose algorithms are candidates.
    pub libraries: Libraries,
    /// In bf16, gradients of weights may be rounded to bf16 if that is faster. Otherwise they are only where a library
    /// cannot write them in f32.
    pub narrow_gradients: bool,
}

impl Default for AutotuneOptions {
    fn default() -> Self {
        AutotuneOptions { deterministic: true, libraries: Libraries::Auto, narrow_gradients: false }
    }
}

/// Whose algorithms a layer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Libraries {
    /// cuDNN's and cuBLASLt's, if installed and faster than this crate's kernels.
    Auto,
    /// This crate's kernels only.
    Builtin,
}

impl Libraries {
    /// The name used on command lines: `auto` or `builtin`.
    pub const fn name(self) -> &'static str {
        match self {
            Libraries::Auto => "auto",
            Libraries::Builtin => "builtin",
        }
    }
}

impl std::fmt::Display for Libraries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Libraries {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let all = [Libraries::Auto, Libraries::Builtin];
        let found = all.into_iter().find(|libraries| libraries.name() == text);
        found.ok_or_else(|| "known are auto and builtin".into())
    }
}

/// The three passes of a layer, each of which is one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The output, from the input and the weights.
    Forward,
    /// The gradient of the input, from the weights and the gradient of the output.
    BackwardInput,
    /// The gradient of the weights, from the input and the gradient of the output.
    BackwardWeights,
}

impl Pass {
    /// All passes.
    pub const ALL: [Pass; 3] = [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeights];

    /// The name used in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward input",
            Pass::BackwardWeights => "backward weights",
        }
    }
}

/// Maximum number of bytes of workspace that an algorithm may need on any GPU.
pub(crate) const WORKSPACE_LIMIT: usize = 256 << 20;

/// Maximum number of bytes of workspace that a convolution's algorithm may need on a GPU with this much memory: a 32nd of it,
/// but no more than 1 GiB. In f32 cuDNN rearranges images in the workspace: 0.8 GiB for the largest layers of `conv6` and `keras`
/// at a batch of 1,024.
pub(crate) fn workspace_limit(memory: u64) -> usize {
    (memory / 32).clamp(WORKSPACE_LIMIT as u64, 1 << 30) as usize
}

/// The algorithm selected for a pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Selection {
    /// The library's algorithm; `None` for this crate's own kernel.
    pub(crate) algorithm: Option<LibraryAlgorithm>,
    /// Bytes of workspace that the algorithm needs.
    pub(crate) workspace: usize,
    /// Time of one run; `None` if nothing was benchmarked.
    pub(crate) milliseconds: Option<f64>,
    /// This crate's own kernel computed something wrong, so it must not stand in for the algorithm either.
    pub(crate) own_is_wrong: bool,
}

impl Selection {
    /// This crate's own kernel, without benchmarking.
    pub(crate) fn builtin() -> Self {
        Selection { algorithm: None, workspace: 0, milliseconds: None, own_is_wrong: false }
    }
}

impl std::fmt::Display for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.algorithm {
            Some(algorithm) => write!(f, "{algorithm}")?,
            None => f.write_str("built in")?,
        }
        match self.milliseconds {
            Some(milliseconds) => write!(f, " {milliseconds:.3} ms"),
            None => Ok(()),
        }
    }
}

/// Version of the autotuning rules; selections made under other rules are not used.
const RULES_VERSION: &str = "3";

/// The cache key: everything that a selection depends on. `problem` says what is computed, `own` is the source of
/// this crate's kernel that the library is benchmarked against.
pub(crate) fn key(device: &Device, library: &str, problem: &str, own: &Source, pass: Pass) -> String {
    let (architecture, driver) = (device.architecture(), device.driver());
    let machine = format!("{architecture:?} {driver:?} {}", device.multiprocessors());
    cache::key(&[
        env!("CARGO_PKG_VERSION"),
        RULES_VERSION,
        device.name(),
        &machine,
        library,
        problem,
        own.text,
        pass.name(),
    ])
}

const FILE: &str = "choice";

/// The cached selection, or else the result of `tune`, which is then cached. A cached algorithm is used only if
/// `supported` returns that it needs no larger workspace than it did.
pub(crate) fn cached_or_tuned(
    key: &str,
    supported: impl Fn(&LibraryAlgorithm) -> Result<usize>,
    tune: impl FnOnce() -> Result<Option<Selection>>,
) -> Result<Option<Selection>> {
    let is_valid = |selection: &Selection| match &selection.algorithm {
        Some(algorithm) => supported(algorithm).is_ok_and(|workspace| workspace <= selection.workspace),
        None => true,
    };
    if let Some(earlier) = read_cached(key).filter(is_valid) {
        return Ok(Some(earlier));
    }
    let Some(selection) = tune()? else { return Ok(None) };
    cache::write_first(FILE, key, encode(&selection).as_bytes());
    // Another rank's selection, if that rank wrote first.
    Ok(Some(read_cached(key).filter(is_valid).unwrap_or(selection)))
}

fn read_cached(key: &str) -> Option<Selection> {
    let content = cache::read(FILE, key)?;
    decode(std::str::from_utf8(&content).ok()?)
}

/// The line of text that the cache holds for a selection.
fn encode(selection: &Selection) -> String {
    let Selection { algorithm, workspace, milliseconds, own_is_wrong } = selection;
    let algorithm = algorithm.as_ref().map_or("built-in".to_owned(), LibraryAlgorithm::encode);
    format!("{algorithm} {workspace} {} {own_is_wrong}\n", milliseconds.unwrap_or_default())
}

fn decode(line: &str) -> Option<Selection> {
    let mut words = line.split_whitespace();
    let algorithm = match words.next()? {
        "built-in" => None,
        word => Some(LibraryAlgorithm::decode(word)?),
    };
    let workspace = words.next()?.parse().ok()?;
    let milliseconds = Some(words.next()?.parse().ok()?);
    Some(Selection { algorithm, workspace, milliseconds, own_is_wrong: words.next()?.parse().ok()? })
}

/// Something of a library that cannot be used, and why.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Note {
    pub(crate) what: String,
    pub(crate) why: String,
}

impl Note {
    pub(crate) fn new(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Self {
        Note { what: what.to_string(), why: why.to_string() }
    }

    /// Adds `notes` about one pass, merging those with the same reason.
    pub(crate) fn collect(all: &mut Vec<Note>, pass: Pass, notes: Vec<Note>) {
        let mut reasons: Vec<Note> = Vec::new();
        for note in notes {
            match reasons.iter_mut().find(|known| known.why == note.why) {
                Some(known) => known.what.push_str(&format!(", {}", note.what)),
                None => reasons.push(Note { what: format!("{} {}", pass.name(), note.what), ..note }),
            }
        }
        all.append(&mut reasons);
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// One line about a layer: what it is, what computes its passes, and notes about what cannot be used.
pub(crate) fn describe(
    layer: &str,
    precision: Precision,
    passes: &[Option<Selection>; 3],
    notes: &[Note],
) -> String {
    // An algorithm that rounds its result is named after bf16, whatever the layer rounds to.
    let named =
        |text: String| if precision == Precision::F16 { text.replace(" bf16", " fp16") } else { text };
    let of_pass = |(pass, selection): (Pass, &Option<Selection>)| {
        Some(named(format!("{} {}", pass.name(), selection.as_ref()?)))
    };
    let passes = Pass::ALL.into_iter().zip(passes).filter_map(of_pass);
    let mut line = format!("{layer}, {precision}: {}", passes.collect::<Vec<_>>().join(", "));
    if !notes.is_empty() {
        let notes: Vec<_> = notes.iter().map(|note| named(note.to_string())).collect();
        line.push_str(&format!(" ({})", notes.join("; ").replace('\n', " ")));
    }
    line
}

/// Panics unless there are at most `max_images`, and the workspace has at least `bytes`.
#[track_caller]
pub(crate) fn check_batch(images: usize, max_images: usize, workspace: View<'_>, bytes: usize) {
    assert!(images <= max_images, "{images} images, but the layer was set up for {max_images}");
    assert!(
        workspace.bytes() >= bytes && (bytes == 0 || workspace.address().is_multiple_of(256)),
        "a workspace of {} bytes at {:#x}, but {bytes} bytes at a multiple of 256 are needed",
        workspace.bytes(),
        workspace.address()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::algorithm::Form;

    fn cudnn() -> LibraryAlgorithm {
        LibraryAlgorithm::cudnn(7, Form::Plain)
    }

    #[test]
    fn large_gpus_allow_large_workspaces() {
        let mib = |memory: u64| workspace_limit(memory << 30) >> 20;
        assert_eq!([0, 4, 16, 80, 139].map(mib), [256, 256, 512, 1024, 1024]);
    }

    #[test]
    fn a_selection_survives_encode_and_decode() {
        for algorithm in [None, Some(cudnn())] {
            let own_is_wrong = algorithm.is_some();
            let selection = Selection { algorithm, workspace: 512, milliseconds: Some(0.125), own_is_wrong };
            assert_eq!(decode(&encode(&selection)), Some(selection));
        }
        for broken in ["", "built-in", "built-in 512", "seven 512 1", "built-in -1 1", "built-in 512 soon"] {
            assert_eq!(decode(broken), None, "{broken}");
            assert_eq!(decode(&format!("{broken} false")), None, "{broken} false");
        }
    }

    #[test]
    fn a_selection_displays_the_algorithm_and_its_time() {
        let text = |algorithm, milliseconds| {
            Selection { algorithm, workspace: 0, milliseconds, own_is_wrong: false }.to_string()
        };
        assert_eq!(text(Some(cudnn()), Some(0.1254)), "cuDNN 7 0.125 ms");
        assert_eq!(text(None, Some(2.0)), "built in 2.000 ms");
        assert_eq!(text(None, None), "built in");
    }

    #[test]
    fn notes_with_the_same_reason_are_merged() {
        let mut all = Vec::new();
        let notes = vec![
            Note::new("cuDNN 1", "too slow"),
            Note::new("cuDNN 2", "refused"),
            Note::new("cuDNN 3", "too slow"),
        ];
        Note::collect(&mut all, Pass::Forward, notes);
        let texts: Vec<_> = all.iter().map(Note::to_string).collect();
        assert_eq!(texts, ["forward cuDNN 1, cuDNN 3: too slow", "forward cuDNN 2: refused"]);
    }
}

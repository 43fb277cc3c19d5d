//! All kernels of this crate, by the sources they come from.

use std::ops::Range;

use super::{Source, compare};
use crate::{activation, arena, conv, digest, dropout, gather, gelu, loss, norm, optimizer, pool};

/// The CUDA sources of all operations.
pub fn sources() -> Vec<&'static Source> {
    let mut all: Vec<&'static Source> = conv::cuda::PRODUCTS.iter().collect();
    all.extend([
        &conv::direct::SOURCE,
        &conv::first::SOURCE,
        &conv::cuda::SUMS,
        &conv::cuda::FLIP,
        &conv::plain::SOURCE,
        &compare::SOURCE,
        &activation::cuda::SOURCE,
        &arena::cuda::SOURCE,
        &digest::cuda::SOURCE,
        &dropout::cuda::SOURCE,
        &gather::cuda::SOURCE,
        &gelu::cuda::SOURCE,
        &loss::cuda::SOURCE,
        &norm::cuda::SOURCE,
        &optimizer::cuda::SOURCE,
        &pool::cuda::SOURCE,
    ]);
    all
}

impl Source {
    /// Names of the kernels in it, in the order of the text.
    pub fn kernels(&self) -> Vec<&'static str> {
        self.definitions().into_iter().map(|(name, _)| name).collect()
    }

    /// The text with the definition of one kernel only. The lines of the others are empty, so that all lines keep their
    /// numbers.
    pub(super) fn text_of(&self, kernel: &str) -> String {
        let definitions = self.definitions();
        let mut others = definitions.iter().filter(|(name, _)| *name != kernel).peekable();
        let mut text = String::with_capacity(self.text.len());
        for (number, line) in self.text.lines().enumerate() {
            while others.next_if(|(_, lines)| lines.end <= number).is_some() {}
            let is_left_out = others.peek().is_some_and(|(_, lines)| lines.contains(&number));
            text.extend([if is_left_out { "" } else { line }, "\n"]);
        }
        text
    }

    /// The kernels and the lines of their definitions. A definition begins with a line `KERNEL(name)…`,
    /// `KERNEL_BOUNDS(name, threads)…` or `KERNEL_BLOCKS(name, threads, blocks)…`, and ends with the line that closes its
    /// braces.
    fn definitions(&self) -> Vec<(&'static str, Range<usize>)> {
        let mut found = Vec::new();
        // The definition that has begun, and how many of its braces are open.
        let mut begun: Option<(&str, usize, usize)> = None;
        for (number, line) in self.text.lines().enumerate() {
            begun = begun.or_else(|| Some((kernel_name(line)?, number, 0)));
            let Some((name, first, mut open)) = begun else { continue };
            let code = line.split("//").next().unwrap_or_default();
            let has_body = open > 0 || code.contains('{');
            open = (open + code.matches('{').count()).saturating_sub(code.matches('}').count());
            begun = Some((name, first, open));
            if has_body && open == 0 {
                found.push((name, first..number + 1));
                begun = None;
            }
        }
        found
    }
}

/// The name of the kernel whose definition begins in this line.
fn kernel_name(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("KERNEL")?;
    let rest = ["_BOUNDS", "_BLOCKS"].iter().find_map(|kind| rest.strip_prefix(kind)).unwrap_or(rest);
    Some(rest.strip_prefix('(')?.split([',', ')']).next()?.trim())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn stems(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder of the crate") {
            let path = entry.expect("an entry of a folder").path();
            if path.is_dir() {
                stems(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "cu") {
                found.push(path.file_stem().expect("a name").to_string_lossy().into_owned());
            }
        }
    }

    #[test]
    fn every_cu_file_is_a_source_and_has_kernels() {
        let mut files = Vec::new();
        stems(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let mut names: Vec<_> = sources().iter().map(|source| source.name.to_owned()).collect();
        files.sort();
        names.sort();
        assert_eq!(files, names);
        let mut kernels: Vec<_> = sources().iter().flat_map(|source| source.kernels()).collect();
        assert!(sources().iter().all(|source| !source.kernels().is_empty()));
        kernels.sort_unstable();
        let count = kernels.len();
        kernels.dedup();
        assert_eq!(kernels.len(), count, "names of kernels are unique");
    }

    #[test]
    fn kernels_are_found_where_they_are_defined() {
        let text = "#define BOTH(T) \\\n    KERNEL(not_this)(T* x) {}\n// KERNEL(nor_this)\nKERNEL(one)(f32* x) {\n    { // {\n    }\n}\n\
                    KERNEL_BOUNDS(two, (4 * WARP))(u32 n) { n++; }\nBODY(f32)\n\
                    KERNEL_BLOCKS(three, WARP, 2)(\n    u32 n) {\n}\nu32 last;\n";
        let source = Source { name: "test", text };
        assert_eq!(source.definitions(), [("one", 3..7), ("two", 7..8), ("three", 9..12)]);
        let only_two = source.text_of("two");
        assert_eq!(only_two.lines().count(), text.lines().count());
        let kept: Vec<_> = only_two.lines().zip(text.lines()).map(|(kept, line)| kept == line).collect();
        let left_out = |number| (3..7).contains(&number) || (9..12).contains(&number);
        assert!(kept.iter().enumerate().all(|(number, kept)| *kept != left_out(number)), "{only_two}");
    }

    #[test]
    fn every_kernel_has_a_text_of_its_own() {
        for source in sources() {
            for kernel in source.kernels() {
                let text = source.text_of(kernel).leak();
                assert_eq!(Source { name: source.name, text }.kernels(), [kernel]);
                assert_eq!(text.lines().count(), source.text.lines().count(), "{kernel}");
            }
        }
    }
}

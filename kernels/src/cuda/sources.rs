//! All kernels of this crate, by the sources they come from.

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
    /// Names of the kernels in it, in the order of the text: every `KERNEL(name)`, `KERNEL_BOUNDS(name, threads)` and
    /// `KERNEL_BLOCKS(name, threads, blocks)` outside of comments and macro definitions.
    pub fn kernels(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        let mut in_macro = false;
        for line in self.text.lines() {
            let definition = in_macro || line.starts_with('#');
            in_macro = definition && line.ends_with('\\');
            let code = if definition { "" } else { line.split("//").next().unwrap_or_default() };
            for (at, word) in code.match_indices("KERNEL") {
                let rest = &code[at + word.len()..];
                let kinds = ["_BOUNDS", "_BLOCKS"];
                let rest = kinds.iter().find_map(|kind| rest.strip_prefix(kind)).unwrap_or(rest);
                if let Some(rest) = rest.strip_prefix('(') {
                    names.push(rest.split([',', ')']).next().unwrap_or_default().trim());
                }
            }
        }
        names
    }
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
        let text = "#define BOTH(T) \\\n    KERNEL(not_this)(T* x) {}\n// KERNEL(nor_this)\nKERNEL(one)(f32* x) {\n\
                    KERNEL_BOUNDS(two, (4 * WARP))(u32 n) {\nBODY(KERNEL(three), f32)\n\
                    KERNEL_BLOCKS(four, WARP, 2)(u32 n) {\n";
        assert_eq!(Source { name: "test", text }.kernels(), ["one", "two", "three", "four"]);
    }
}

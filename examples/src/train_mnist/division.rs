//! How the images of a step are divided over ranks and micro-batches. Pure.
//!
//! `--batch` gives every rank the same number of images. `--global-batch` fixes the images of a step on all ranks
//! together, so that a run trains the same on any number of ranks: the same global batches, as many steps an epoch, the
//! same learning rate. If they cannot be divided equally, the first ranks have one image more.
//!
//! Gradients are means over micro-batches and ranks, which would give an image of a smaller batch more weight. So the
//! loss of every micro-batch is divided by the same number, the mean size of all micro-batches
//! ([`mean_micro_batch`](Division::mean_micro_batch)): then the mean of gradients is the sum over all images, divided by
//! their number. With equal sizes that is the size itself, and the bits are those of a plain mean.
//!
//! In a world-size-invariant run the global batch is divided into the micro-batches first, and consecutive ones are given
//! to each rank, so that no micro-batch depends on the number of ranks.

use std::ops::Range;

use mgpu::batch_part;

use crate::parallel::Parallel;

/// The images of a step on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Division {
    /// Images of a step on all ranks.
    global_batch: usize,
    rank: usize,
    ranks: usize,
    /// Number of micro-batches on each rank.
    micro_batches: usize,
    /// The micro-batches are parts of the global batch, whatever the number of ranks.
    is_invariant: bool,
}

impl Division {
    /// Divides `global_batch` images over `ranks` ranks.
    ///
    /// # Errors
    /// If a rank, or a micro-batch, would have no image, or the micro-batches cannot be divided over the ranks.
    pub(super) fn new(
        parallel: &Parallel,
        global_batch: usize,
        (rank, ranks): (u32, u32),
    ) -> Result<Self, String> {
        let micro_batches = parallel.count_micro_batches(ranks)?;
        let (rank, ranks) = (rank as usize, ranks as usize);
        if global_batch < ranks {
            return Err(format!("a global batch of {global_batch} images is too small for {ranks} ranks"));
        }
        let is_invariant = parallel.is_world_size_invariant();
        let division = Division { global_batch, rank, ranks, micro_batches, is_invariant };
        let last = Division { rank: ranks - 1, ..division };
        if !last.micro_batch(micro_batches - 1).is_empty() {
            return Ok(division);
        }
        Err(if is_invariant {
            let all = ranks * micro_batches;
            format!("a global batch of {global_batch} images is too small for --world-size-invariant {all}")
        } else {
            let images = last.images().len();
            format!("the {images} images of a rank are too few for its {micro_batches} micro-batches")
        })
    }

    /// `images` images on a single rank, in one micro-batch.
    pub(super) fn undivided(images: usize) -> Self {
        Division { global_batch: images, rank: 0, ranks: 1, micro_batches: 1, is_invariant: false }
    }

    /// Images of a step on all ranks.
    pub(super) fn global_batch(&self) -> usize {
        self.global_batch
    }

    /// This rank's images, as entries of the global batch.
    pub(super) fn images(&self) -> Range<usize> {
        if !self.is_invariant {
            return batch_part(self.global_batch, self.rank, self.ranks);
        }
        let first = self.rank * self.micro_batches;
        self.part_of_all(first).start..self.part_of_all(first + self.micro_batches - 1).end
    }

    /// The images of micro-batch `index` of this rank, as entries of the rank's images.
    pub(super) fn micro_batch(&self, index: usize) -> Range<usize> {
        let images = self.images();
        if !self.is_invariant {
            return batch_part(images.len(), index, self.micro_batches);
        }
        let part = self.part_of_all(self.rank * self.micro_batches + index);
        part.start - images.start..part.end - images.start
    }

    /// Micro-batch `number` of all ranks, in a world-size-invariant run.
    fn part_of_all(&self, number: usize) -> Range<usize> {
        batch_part(self.global_batch, number, self.ranks * self.micro_batches)
    }

    /// Number of micro-batches on each rank.
    pub(super) fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Images in the largest micro-batch of this rank, which is the first one.
    pub(super) fn largest_micro_batch(&self) -> usize {
        self.micro_batch(0).len()
    }

    /// The mean number of images in a micro-batch, over all ranks.
    pub(super) fn mean_micro_batch(&self) -> f64 {
        self.global_batch as f64 / (self.ranks * self.micro_batches) as f64
    }

    /// Checks that the micro-batches of each rank are equal, which engines with fixed launches need.
    ///
    /// # Errors
    /// If they are not; the text names the rank and its images.
    pub(super) fn require_equal_micro_batches(&self) -> Result<(), String> {
        let uneven = (0..self.ranks).map(|rank| Division { rank, ..*self }).find(|division| {
            division.largest_micro_batch() != division.micro_batch(self.micro_batches - 1).len()
        });
        uneven.map_or(Ok(()), |division| {
            Err(format!(
                "the {} images of rank {} cannot be split into {} equal micro-batches; only on CPUs, and with the whole \
                 network on each rank, may they be unequal",
                division.images().len(),
                division.rank,
                self.micro_batches
            ))
        })
    }

    /// How the images are divided, in words, if ranks have different numbers of them.
    pub(super) fn describe_uneven(&self) -> Option<String> {
        let images: Vec<usize> =
            (0..self.ranks).map(|rank| Division { rank, ..*self }.images().len()).collect();
        let (most, fewest) = (images.iter().max()?, images.iter().min()?);
        if most == fewest {
            return None;
        }
        let having = |wanted: &usize| images.iter().filter(|images| *images == wanted).count();
        let s = |count: usize| if count == 1 { "" } else { "s" };
        let (large, small) = (having(most), having(fewest));
        let others = if large + small < self.ranks { ", the rest in between" } else { "" };
        Some(format!(
            "the {} images of a step are divided unevenly: {most} on {large} rank{}, {fewest} on {small} rank{}{others}",
            self.global_batch,
            s(large),
            s(small)
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        parallel: Parallel,
    }

    fn divide(flags: &str, global_batch: usize, ranks: u32) -> Result<Vec<Division>, String> {
        let words = ["train"].into_iter().chain(flags.split_whitespace());
        let Flags { parallel } = Flags::try_parse_from(words).unwrap();
        (0..ranks).map(|rank| Division::new(&parallel, global_batch, (rank, ranks))).collect()
    }

    /// All micro-batches of all ranks, as entries of the global batch.
    fn micro_batches(divisions: &[Division]) -> Vec<Range<usize>> {
        let of_rank = |division: &Division| {
            let first = division.images().start;
            let parts = (0..division.micro_batches()).map(|index| division.micro_batch(index));
            parts.map(move |part| first + part.start..first + part.end).collect::<Vec<_>>()
        };
        divisions.iter().flat_map(of_rank).collect()
    }

    proptest! {
        #[test]
        fn every_image_is_in_one_micro_batch(global in 1usize..200, ranks in 1u32..9, count in 1usize..5) {
            let Ok(divisions) = divide(&format!("--accumulate {count}"), global, ranks) else {
                prop_assert!(global < ranks as usize * count);
                return Ok(());
            };
            let all = micro_batches(&divisions);
            prop_assert_eq!(all.len(), ranks as usize * count);
            prop_assert!(all.iter().all(|part| !part.is_empty()));
            prop_assert_eq!(all.iter().cloned().flatten().collect::<Vec<_>>(), (0..global).collect::<Vec<_>>());
            for division in &divisions {
                let largest = (0..count).map(|index| division.micro_batch(index).len()).max().unwrap();
                prop_assert_eq!(division.largest_micro_batch(), largest);
            }
            let images: Vec<usize> = divisions.iter().map(|division| division.images().len()).collect();
            prop_assert!(images.is_sorted_by(|a, b| a >= b) && images[0] - images[ranks as usize - 1] <= 1);
            prop_assert_eq!(divisions[0].describe_uneven().is_some(), global % ranks as usize > 0);
        }

        #[test]
        fn micro_batches_of_an_invariant_run_do_not_depend_on_ranks(global in 8usize..100) {
            let of = |ranks| micro_batches(&divide("--world-size-invariant 8", global, ranks).unwrap());
            let alone = of(1);
            for ranks in [2, 4, 8] {
                prop_assert_eq!(&of(ranks), &alone);
            }
        }
    }

    #[test]
    fn equal_micro_batches_have_their_mean_size() {
        for (flags, global, ranks, size) in [
            ("", 64, 4, 16.0),
            ("--accumulate 2", 64, 4, 8.0),
            ("--world-size-invariant 8", 64, 2, 8.0),
            ("", 64, 3, 64.0 / 3.0),
        ] {
            let division = divide(flags, global, ranks).unwrap()[0];
            assert_eq!(division.mean_micro_batch(), size, "{flags} on {ranks}");
        }
    }

    #[test]
    fn uneven_and_impossible_divisions_are_named() {
        let uneven = |flags: &str, global, ranks| divide(flags, global, ranks).unwrap()[0].describe_uneven();
        assert_eq!(uneven("", 64, 4), None);
        assert_eq!(
            uneven("", 64, 3).unwrap(),
            "the 64 images of a step are divided unevenly: 22 on 1 rank, 21 on 2 ranks"
        );
        assert_eq!(
            uneven("--world-size-invariant 8", 12, 4).unwrap(),
            "the 12 images of a step are divided unevenly: 4 on 2 ranks, 2 on 2 ranks"
        );
        let refused = |flags: &str, global, ranks| divide(flags, global, ranks).unwrap_err();
        assert_eq!(refused("", 2, 3), "a global batch of 2 images is too small for 3 ranks");
        assert_eq!(
            refused("--accumulate 4", 10, 3),
            "the 3 images of a rank are too few for its 4 micro-batches"
        );
        assert_eq!(
            refused("--world-size-invariant 8", 7, 4),
            "a global batch of 7 images is too small for --world-size-invariant 8"
        );
        assert!(refused("--world-size-invariant 8", 64, 3).contains("a multiple of the number of ranks, 3"));
        let equal = |flags: &str, global, ranks| {
            divide(flags, global, ranks).unwrap()[0].require_equal_micro_batches()
        };
        assert_eq!(equal("--accumulate 2", 12, 3), Ok(()));
        assert_eq!(equal("", 64, 3), Ok(()));
        let text = equal("--accumulate 2", 14, 3).unwrap_err();
        assert!(text.contains("the 5 images of rank 0 cannot be split into 2 equal"), "{text}");
    }
}

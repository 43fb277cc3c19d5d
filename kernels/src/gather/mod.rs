//! Gathering: assembles the inputs of a batch from a data set in memory and an order of its samples.
//!
//! Contract: the data set has M samples with `sample_len` bytes and a label each. Row j of a batch that begins at
//! index `first` of the order is sample `s = order[first + j]`, or `s = first + j` without an order: `x[j, i] =
//! pixel[s, i] / 255`, rounded once to the type of `x`, and `labels[j] = label[s]`. Batches of a training epoch are
//! numbered: the batch at `position` begins at index `position · batch`.
//!
//! On a GPU the data set is copied once, as bytes; after that, a step copies nothing from the host.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(test)]
mod tests {
    use super::cpu::Samples;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn batches_contain_their_samples(samples in 1usize..20, len in 1usize..40, batch in 1usize..6, position in 0u64..4) {
            let images: Vec<u8> = (0..samples * len).map(|i| (i * 37 % 256) as u8).collect();
            let labels: Vec<u8> = (0..samples).map(|i| (i * 3 % 10) as u8).collect();
            let order: Vec<u32> = (0..batch * 4).map(|i| (i * 7 % samples) as u32).collect();
            let data = Samples { images: &images, labels: &labels, order: Some(&order) };
            let (mut x, mut gathered) = (vec![f32::NAN; batch * len], vec![77; batch]);
            cpu::batch(&data, position, &mut x, &mut gathered);
            for (j, (row, label)) in x.chunks(len).zip(&gathered).enumerate() {
                let sample = order[position as usize * batch + j] as usize;
                prop_assert_eq!(*label, labels[sample]);
                for (x, pixel) in row.iter().zip(&images[sample * len..]) {
                    prop_assert_eq!(*x, f32::from(*pixel) / 255.0);
                }
            }
        }
    }

    #[test]
    fn without_an_order_samples_are_in_the_order_of_the_data_set() {
        let data = Samples { images: &[0, 51, 255], labels: &[4, 5, 6], order: None };
        let (mut x, mut labels) = ([f32::NAN; 2], [0; 2]);
        cpu::range(&data, 1, &mut x, &mut labels);
        assert_eq!((x, labels), ([0.2, 1.0], [5, 6]));
    }

    #[test]
    #[should_panic(expected = "sample 3 of 3")]
    fn an_invalid_sample_index_panics() {
        let data = Samples { images: &[0, 51, 255], labels: &[4, 5, 6], order: Some(&[3]) };
        cpu::range(&data, 0, &mut [0.0], &mut [0]);
    }
}

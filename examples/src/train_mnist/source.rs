//! Which digits to train on.

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;

use mgpu::{Buffer, Communicator, World};

use super::args::Args;
use crate::data::{Dataset, IMAGE_LEN, Mnist, Origin, Split, digits, idx};

/// The data that the arguments ask for; without any, MNIST from `MGPU_DATA`, else generated digits.
pub(super) fn load(
    args: &Args,
    _world: &World,
    comm: &mut dyn Communicator,
) -> Result<Mnist, Box<dyn Error>> {
    let named = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    let data = match named {
        Some(folder) if !args.synthetic => idx::read(&folder)?,
        _ => generate(args.seed, comm)?,
    };
    // Ranks that read different folders would train on different things without noticing.
    let sizes = comm.all_gather_slice(&[data.train.len() as i64, data.test.len() as i64])?;
    if let Some(rank) = sizes.chunks(2).position(|pair| pair != &sizes[..2]) {
        return Err(format!("rank {rank} has other data than rank 0: {sizes:?} images").into());
    }
    Ok(data)
}

/// Generated digits. Every rank draws its share, and all get all.
fn generate(seed: u64, comm: &mut dyn Communicator) -> mgpu::Result<Mnist> {
    let mut split = |split| -> mgpu::Result<Dataset> {
        let count = digits::count(split);
        let ranks = comm.size() as usize;
        // Equal shares, so that they can be gathered: the last ones may be empty or short.
        let share = count.div_ceil(ranks);
        let own =
            |rank: usize| -> Range<usize> { (rank * share).min(count)..((rank + 1) * share).min(count) };
        let rank = comm.rank() as usize;
        let (images, labels) = digits::generate(seed, split, own(rank));
        let mut gather = |values: &[u8], width: usize| -> mgpu::Result<Vec<u8>> {
            let mut all = Buffer::zeroed::<u8>(share * ranks * width);
            let begin = rank * share * width;
            all.as_mut_slice::<u8>()[begin..begin + values.len()].copy_from_slice(values);
            let all = comm.all_gather(all)?.wait()?;
            Ok(all.as_slice::<u8>()[..count * width].to_vec())
        };
        Ok(Dataset { images: gather(&images, IMAGE_LEN)?, labels: gather(&labels, 1)? })
    };
    let (train, test) = (split(Split::Train)?, split(Split::Test)?);
    Ok(Mnist { train, test, origin: Origin::Generated { seed } })
}

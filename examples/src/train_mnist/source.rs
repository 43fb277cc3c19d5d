//! Which digits to train on.

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use mgpu::{Buffer, Communicator, World};

use super::args::Args;
use crate::data::download::{self, Progress};
use crate::data::{Dataset, IMAGE_LEN, Mnist, Origin, Split, digits, idx};

/// A download on a slow line takes longer than any collective may.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// The data that the arguments ask for. Without any: MNIST from the folder `MGPU_DATA`, else as downloaded earlier,
/// else generated digits.
pub(super) fn load(args: &Args, world: &World, comm: &mut dyn Communicator) -> Result<Mnist, Box<dyn Error>> {
    let named = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    let data = if args.synthetic {
        generate(args.seed, comm)?
    } else if args.download {
        download(world)?
    } else if let Some(folder) = named {
        let asked = if args.data.is_some() { "--data" } else { "MGPU_DATA" };
        idx::read(&folder).map_err(|error| format!("{asked}: {error}"))?
    } else if let Some(data) = download::earlier()? {
        data
    } else {
        generate(args.seed, comm)?
    };
    // Ranks that read different folders would train on different things without noticing.
    let sizes = comm.all_gather_slice(&[data.train.len() as i64, data.test.len() as i64])?;
    if let Some(rank) = sizes.chunks(2).position(|pair| pair != &sizes[..2]) {
        return Err(format!("rank {rank} has other data than rank 0: {sizes:?} images").into());
    }
    Ok(data)
}

/// Rank 0 downloads, then everybody reads the files. If rank 0 fails, it ends, and the others learn of that.
fn download(world: &World) -> Result<Mnist, Box<dyn Error>> {
    const KEY: &str = "mnist-downloaded";
    let Some(store) = world.store() else { return Ok(download::mnist(Progress::Terminal)?) };
    if world.rank() == 0 {
        let data = download::mnist(Progress::Terminal)?;
        store.set(KEY, b"", &[], world.size() - 1)?;
        return Ok(data);
    }
    store.get(KEY, 0, DOWNLOAD_TIMEOUT)?;
    Ok(download::mnist(Progress::Quiet)?)
}

/// Generated digits. Every rank draws its share, and all get all.
fn generate(seed: u64, comm: &mut dyn Communicator) -> mgpu::Result<Mnist> {
    let mut split = |split| -> mgpu::Result<Dataset> {
        let count = digits::count(split);
        let (rank, ranks) = (comm.rank() as usize, comm.size() as usize);
        // Equal shares, so that they can be gathered: the last ones may be empty or short.
        let share = count.div_ceil(ranks);
        let own: Range<usize> = (rank * share).min(count)..((rank + 1) * share).min(count);
        let (images, labels) = digits::generate(seed, split, own);
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

//! Where the training data comes from.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mgpu::replicate::verify_settings;
use mgpu::{Buffer, Communicator, World};

use super::args::Args;
use crate::data::download::{self, Progress};
use crate::data::{DataError, Dataset, IMAGE_LEN, Mnist, Origin, Split, digits, idx};

/// A download on a slow connection takes longer than the timeout of collectives.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Loads the data that the arguments ask for. By default: MNIST from the folder `MGPU_DATA`, else from an earlier
/// download, else generated digits. An empty `MGPU_DATA` counts as set and means the current folder.
///
/// A set that is not among `splits` may be empty.
pub(super) fn load(
    args: &Args,
    splits: &[Split],
    world: &World,
    comm: &mut Communicator,
) -> Result<Mnist, Box<dyn Error>> {
    let named = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    // All ranks generate digits together.
    let mut together =
        |source: &str| verify_settings(comm, &[("--data, --synthetic or --download", source.to_owned())]);
    let data = if args.synthetic {
        together("generated digits")?;
        generate(args.seed(), splits, comm)?
    } else if args.download {
        together("a download")?;
        download(world)?
    } else if let Some(folder) = named {
        together("a folder")?;
        let asked = if args.data.is_some() { "--data" } else { "MGPU_DATA" };
        read(&folder, splits).map_err(|error| format!("{asked}: {error}"))?
    } else if let Some(data) = download::cached()? {
        together("an earlier download")?;
        data
    } else {
        together("generated digits")?;
        generate(args.seed(), splits, comm)?
    };
    // Ranks with different folders would otherwise train on different data unnoticed.
    let images = |set: &Dataset| format!("{} images with checksum {:016x}", set.len(), set.checksum());
    verify_settings(comm, &[("as training set", images(&data.train)), ("as test set", images(&data.test))])?;
    Ok(data)
}

/// Reads the files of a folder.
fn read(folder: &Path, splits: &[Split]) -> Result<Mnist, DataError> {
    if splits.contains(&Split::Train) {
        return idx::read(folder);
    }
    let test = idx::read_split(folder, Split::Test)?;
    Ok(Mnist { train: Dataset::default(), test, origin: Origin::Files(folder.to_owned()) })
}

/// Rank 0 downloads, then all ranks read the files. If rank 0 fails it exits, and the others notice that.
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

/// Generates digits: each rank generates its share, and an all-gather distributes them.
fn generate(seed: u64, splits: &[Split], comm: &mut Communicator) -> mgpu::Result<Mnist> {
    let mut split = |split| -> mgpu::Result<Dataset> {
        if !splits.contains(&split) {
            return Ok(Dataset::default());
        }
        let count = digits::count(split);
        let (rank, ranks) = (comm.rank() as usize, comm.size() as usize);
        // Equal shares for the all-gather: the last ones may be short or empty.
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

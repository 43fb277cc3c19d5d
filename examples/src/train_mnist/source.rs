//! Where the training data comes from, and whether its images are kept in memory.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mgpu::replicate::verify_settings;
use mgpu::{Buffer, Communicator, World};

use super::args::{Args, DataOn};
use crate::data::download::{self, Progress};
use crate::data::idx::{self, KeepImages};
use crate::data::{DataError, Dataset, IMAGE_LEN, Mnist, Origin, Samples, Split, digits};

/// A download on a slow connection takes longer than the timeout of collectives.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Images of a set that are kept in memory even if memory is short: a little more than MNIST has.
const ALWAYS_IN_MEMORY: u64 = 64 << 20;

/// The training and the test set of a run.
#[derive(Debug)]
pub(super) struct Data {
    pub(super) train: Samples,
    pub(super) test: Samples,
    /// The source of both.
    pub(super) origin: Origin,
    /// Checksum of the training set.
    pub(super) train_xxh3: u64,
}

impl Data {
    /// The data in words. Says so if the training images are not in memory.
    pub(super) fn describe(&self) -> String {
        match self.train.file() {
            None => self.origin.to_string(),
            Some(_) => format!("{}, images read as they are needed", self.origin),
        }
    }
}

/// Where each rank of this host keeps the images of a set.
pub(super) fn keep_images(args: &Args, world: &World) -> KeepImages {
    match args.data_on {
        DataOn::Host => KeepImages::InMemory,
        DataOn::Disk => KeepImages::InFile,
        DataOn::Auto | DataOn::Device => {
            let share = |bytes: u64| (bytes / 2 / u64::from(world.local_size())).max(ALWAYS_IN_MEMORY);
            mgpu::available_memory()
                .map_or(KeepImages::InMemory, |bytes| KeepImages::InMemoryUpTo(share(bytes)))
        }
    }
}

/// Loads the data that the arguments ask for. By default: MNIST from the folder `MGPU_DATA`, else from an earlier
/// download, else generated digits. An empty `MGPU_DATA` counts as set and means the current folder.
///
/// A set that is not among `splits` may be empty.
pub(super) fn load(
    args: &Args,
    splits: &[Split],
    world: &World,
    comm: &mut Communicator,
) -> Result<Data, Box<dyn Error>> {
    let named = args.data.clone().or_else(|| std::env::var_os("MGPU_DATA").map(PathBuf::from));
    // All ranks generate digits together.
    let mut together =
        |source: &str| verify_settings(comm, &[("--data, --synthetic or --download", source.to_owned())]);
    let no_files = |source: &str| match args.data_on {
        DataOn::Disk => Err(format!("--data-on disk needs --data DIR with uncompressed files, not {source}")),
        _ => Ok(()),
    };
    let digits = format!("{} generated digits", args.digits(Split::Train));
    let mut data = if args.synthetic {
        together(&digits)?;
        no_files("generated digits")?;
        in_memory(generate(args, splits, comm)?)
    } else if args.download {
        together("a download")?;
        no_files("a download")?;
        in_memory(download(world)?)
    } else if let Some(folder) = named {
        together("a folder")?;
        let asked = if args.data.is_some() { "--data" } else { "MGPU_DATA" };
        let keep = || keep_images(args, world);
        read(&folder, splits, keep).map_err(|error| format!("{asked}: {error}"))?
    } else if let Some(data) = download::cached()? {
        together("an earlier download")?;
        no_files("an earlier download")?;
        in_memory(data)
    } else {
        together(&digits)?;
        no_files("generated digits")?;
        in_memory(generate(args, splits, comm)?)
    };
    data.train_xxh3 = data.train.checksum()?;
    let test_xxh3 = data.test.checksum()?;
    // Ranks with different folders would otherwise train on different data unnoticed.
    let images = |set: &Samples, xxh3: u64| format!("{} images with checksum {xxh3:016x}", set.len());
    let (train, test) = (images(&data.train, data.train_xxh3), images(&data.test, test_xxh3));
    verify_settings(comm, &[("as training set", train), ("as test set", test)])?;
    Ok(data)
}

fn in_memory(Mnist { train, test, origin }: Mnist) -> Data {
    Data { train: train.into(), test: test.into(), origin, train_xxh3: 0 }
}

/// Opens the files of a folder. `keep` says where the images of the next set are kept.
fn read(folder: &Path, splits: &[Split], keep: impl Fn() -> KeepImages) -> Result<Data, DataError> {
    let train = if splits.contains(&Split::Train) {
        // The error lists all missing files.
        idx::check_names(folder)?;
        idx::open(folder, Split::Train, keep())?
    } else {
        Dataset::default().into()
    };
    let test = idx::open(folder, Split::Test, keep())?;
    Ok(Data { train, test, origin: Origin::Files(folder.to_owned()), train_xxh3: 0 })
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
fn generate(args: &Args, splits: &[Split], comm: &mut Communicator) -> mgpu::Result<Mnist> {
    let seed = args.seed();
    let mut split = |split| -> mgpu::Result<Dataset> {
        if !splits.contains(&split) {
            return Ok(Dataset::default());
        }
        let count = args.digits(split) as usize;
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

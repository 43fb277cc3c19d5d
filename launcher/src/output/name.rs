//! What a rank is called.

use std::fmt;

use super::Stream;

/// A rank and, if the launch has several jobs, its job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RankName {
    /// The number of its job; `None` if there is only one.
    pub(crate) job: Option<u32>,
    /// Its number in its own world.
    pub(crate) rank: u32,
}

impl RankName {
    /// The names of the ranks of all jobs, which have these numbers of ranks.
    pub(super) fn of(jobs: &[u32]) -> Vec<RankName> {
        let several = jobs.len() > 1;
        let of_job = |(job, ranks): (u32, &u32)| {
            (0..*ranks).map(move |rank| RankName { job: several.then_some(job), rank })
        };
        (0..).zip(jobs).flat_map(of_job).collect()
    }

    /// `3`, or `1.3` for rank 3 of job 1.
    pub(super) fn short(self) -> String {
        match self.job {
            None => self.rank.to_string(),
            Some(job) => format!("{job}.{}", self.rank),
        }
    }

    /// The log in the folder of all logs: `rank-3.log` or `job-1/rank-3.log`; `rank-3.stdout.log` if it has one stream.
    pub(super) fn log_file(self, stream: Option<Stream>) -> String {
        let stream = match stream {
            None => "",
            Some(Stream::Stdout) => ".stdout",
            Some(Stream::Stderr) => ".stderr",
        };
        let file = format!("rank-{}{stream}.log", self.rank);
        self.job.map_or(file.clone(), |job| format!("job-{job}/{file}"))
    }
}

/// "rank 3" or "rank 3 of job 1".
impl fmt::Display for RankName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        self.job.map_or(Ok(()), |job| write!(f, " of job {job}"))
    }
}

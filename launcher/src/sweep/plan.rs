//! What is to be measured: arguments + machine → runs, each checked before the first is made.

use clap::ValueEnum;

use super::args::{Args, RankList};
use super::cells::{Cell, Grid, Scaling, first_repeated};
use super::devices::Devices;
use super::measure::{Launcher, Request};
use super::record::{Conditions, join_quoted};
use crate::exit_code;
use crate::plan::BackendChoice;

/// What is to be measured.
#[derive(Debug)]
pub(super) struct Plan {
    program: String,
    pub(super) grid: Grid,
    pub(super) repeat: u32,
    pub(super) devices: Devices,
    pub(super) launcher: Launcher,
    pub(super) conditions: Conditions,
}

impl Plan {
    /// # Errors
    /// Exit code and text, if a cell cannot be run.
    pub(super) fn new(args: &Args) -> Result<Self, (u8, String)> {
        let usage = |error: String| (exit_code::USAGE, error);
        let devices = Devices::detect(args.backend);
        let ranks = match &args.ranks {
            RankList::Auto => devices.rank_numbers().map_err(usage)?,
            RankList::Of(ranks) => ranks.clone(),
        };
        if let Some(most) =
            ranks.last().filter(|ranks| !args.oversubscribe && devices.are_fewer_than(**ranks))
        {
            return Err(usage(devices.refusal(*most)));
        }
        let (program, arguments) = args.command.split_first().expect("clap requires a program");
        let scaling = match &args.strong {
            Some(flag) => Scaling::Strong(flag.clone()),
            None if args.weak => Scaling::Weak,
            None => Scaling::AsGiven,
        };
        let flags: Vec<&str> = args.vary.iter().map(|vary| vary.flag.as_str()).collect();
        if let Some(twice) = first_repeated(&flags) {
            return Err(usage(format!(
                "--vary={twice} is there twice; write all values in one: {twice}=V,V"
            )));
        }
        let mut options = args.launch_option.clone();
        if args.backend != BackendChoice::Auto {
            let name = args.backend.to_possible_value().expect("no backend is hidden");
            options.extend(["--backend".to_owned(), name.get_name().to_owned()]);
        }
        let conditions = Conditions {
            command: args.command.clone(),
            scaling: scaling.to_string(),
            launch_options: options.clone(),
            machine: devices.describe(),
        };
        let executable = std::env::current_exe()
            .map_err(|error| (exit_code::LAUNCHER, format!("cannot find mgpurun itself: {error}")))?;
        let plan = Plan {
            program: program.clone(),
            grid: Grid { ranks, vary: args.vary.clone(), scaling, arguments: arguments.to_vec() },
            repeat: args.repeat,
            devices,
            launcher: Launcher { executable, options },
            conditions,
        };
        plan.check()?;
        Ok(plan)
    }

    /// Finds out before the first run what would make later ones impossible.
    fn check(&self) -> Result<(), (u8, String)> {
        let mut checked = Vec::new();
        for cell in self.grid.cells() {
            let command = self.command(&cell).map_err(|error| (exit_code::USAGE, error))?;
            // Launches differ in their number of ranks only: the program's options are its own business.
            if !checked.contains(&cell.ranks) {
                self.launcher.check(&self.request(&cell, &command))?;
                checked.push(cell.ranks);
            }
        }
        Ok(())
    }

    /// Program and arguments in a cell.
    pub(super) fn command(&self, cell: &Cell) -> Result<Vec<String>, String> {
        let arguments = self.grid.arguments_of(cell)?;
        Ok(std::iter::once(self.program.clone()).chain(arguments).collect())
    }

    pub(super) fn request<'a>(&self, cell: &Cell, command: &'a [String]) -> Request<'a> {
        let share_gpus = self.devices.are_gpus() && self.devices.are_fewer_than(cell.ranks);
        Request { ranks: cell.ranks, share_gpus, command }
    }

    /// All runs, in order.
    pub(super) fn runs(&self) -> Vec<(u32, Cell)> {
        (1..=self.repeat)
            .flat_map(|repeat| self.grid.cells().into_iter().map(move |cell| (repeat, cell)))
            .collect()
    }

    /// The command lines of one round.
    pub(super) fn describe(&self) -> String {
        let line = |cell: Cell| {
            let command = self.command(&cell).expect("it was checked");
            let words = self.launcher.words(&self.request(&cell, &command));
            format!("mgpurun {}\n", join_quoted(&words))
        };
        self.grid.cells().into_iter().map(line).collect()
    }
}

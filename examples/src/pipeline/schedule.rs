//! The schedule of a pipeline: one forward, one backward (1F1B, Narayanan et al., "Memory-Efficient Pipeline-Parallel
//! DNN Training", ICML 2021; PipeDream-Flush).
//!
//! A step has m micro-batches and p stages. A forward pass runs through the stages in ascending order, the backward
//! pass in descending order. Stage s first makes p − s − 1 forward passes (*warm-up*), then one forward and one
//! backward pass alternately, then the rest of the backward passes. So it has at most p − s micro-batches in flight,
//! which is the memory it needs, and while a stage waits for the first gradients the others work. If all passes of all
//! stages take equally long, a stage is idle for (p − 1) / (m + p − 1) of the step.
//!
//! **No deadlock.** Messages may have no room to wait in: a send may last until its receiver receives. Two neighbours
//! exchange messages in both directions at the same time, an activation downstream and a gradient upstream. The one
//! upstream sends before it receives, and the one downstream receives before it sends: therefore the activation of the
//! next micro-batch is received right after a backward pass, into the memory that it has freed, before its gradient is
//! sent. The test below tries all small pipelines without any room.

/// A part of a step. The numbers are those of micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Receive the input from the stage before.
    ReceiveActivation(usize),
    Forward(usize),
    /// Send the output to the next stage.
    SendActivation(usize),
    /// Receive the gradient of the output from the next stage.
    ReceiveGradient(usize),
    Backward(usize),
    /// Send the gradient of the input to the stage before.
    SendGradient(usize),
}

impl Action {
    /// The micro-batch.
    pub(super) fn number(self) -> usize {
        match self {
            Action::ReceiveActivation(number)
            | Action::Forward(number)
            | Action::SendActivation(number)
            | Action::ReceiveGradient(number)
            | Action::Backward(number)
            | Action::SendGradient(number) => number,
        }
    }
}

/// The position of a stage in its pipeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    /// Counted from 0.
    pub(super) stage: usize,
    pub(super) stages: usize,
    pub(super) micro_batches: usize,
}

impl Schedule {
    pub(super) fn is_first(&self) -> bool {
        self.stage == 0
    }

    pub(super) fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// The largest number of micro-batches between their forward and their backward pass.
    pub(super) fn in_flight(&self) -> usize {
        (self.stages - self.stage).min(self.micro_batches)
    }

    /// What happens from the backward pass of micro-batch `index - 1`, or from the beginning of the step, to that of
    /// micro-batch `index`.
    pub(super) fn until_backward(&self, index: usize) -> Vec<Action> {
        let warm_up = self.in_flight() - 1;
        let mut actions = Vec::new();
        if index == 0 {
            for number in 0..warm_up {
                self.receive_activation(number, &mut actions);
                self.forward(number, &mut actions);
            }
            self.receive_activation(warm_up, &mut actions);
        }
        self.forward(index + warm_up, &mut actions);
        if !self.is_last() {
            actions.push(Action::ReceiveGradient(index));
        }
        actions.push(Action::Backward(index));
        self.receive_activation(index + warm_up + 1, &mut actions);
        if !self.is_first() {
            actions.push(Action::SendGradient(index));
        }
        actions
    }

    /// The input of micro-batch `number`, if there is one.
    fn receive_activation(&self, number: usize, actions: &mut Vec<Action>) {
        if number < self.micro_batches && !self.is_first() {
            actions.push(Action::ReceiveActivation(number));
        }
    }

    /// The forward pass of micro-batch `number`, if there is one, and its output.
    fn forward(&self, number: usize, actions: &mut Vec<Action>) {
        if number >= self.micro_batches {
            return;
        }
        actions.push(Action::Forward(number));
        if !self.is_last() {
            actions.push(Action::SendActivation(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Action::{Backward, Forward, ReceiveActivation, ReceiveGradient, SendActivation, SendGradient};

    fn steps(stages: usize, micro_batches: usize) -> Vec<Vec<Action>> {
        let of = |stage| {
            let schedule = Schedule { stage, stages, micro_batches };
            (0..micro_batches).flat_map(|index| schedule.until_backward(index)).collect()
        };
        (0..stages).map(of).collect()
    }

    #[test]
    fn warm_up_then_one_forward_one_backward() {
        let middle = &steps(3, 4)[1];
        let passes = middle.iter().filter(|action| matches!(action, Forward(_) | Backward(_)));
        let expected = [
            Forward(0),
            Forward(1),
            Backward(0),
            Forward(2),
            Backward(1),
            Forward(3),
            Backward(2),
            Backward(3),
        ];
        assert!(passes.eq(&expected), "{middle:?}");
    }

    #[test]
    fn as_many_activations_as_stages_are_in_flight() {
        for (stages, micro_batches) in [(1, 3), (2, 1), (2, 8), (3, 2), (4, 4), (5, 9)] {
            for (stage, actions) in steps(stages, micro_batches).iter().enumerate() {
                let (mut in_flight, mut most) = (0usize, 0);
                for action in actions {
                    match action {
                        ReceiveActivation(_) => in_flight += 1,
                        Forward(_) if stage == 0 => in_flight += 1,
                        Backward(_) => in_flight -= 1,
                        _ => {}
                    }
                    most = most.max(in_flight);
                }
                assert_eq!((in_flight, most), (0, micro_batches.min(stages - stage)));
            }
        }
    }

    /// The action of the neighbour that a message needs, and which neighbour that is.
    fn counterpart(stage: usize, action: Action) -> Option<(usize, Action)> {
        match action {
            SendActivation(number) => Some((stage + 1, ReceiveActivation(number))),
            ReceiveGradient(number) => Some((stage + 1, SendGradient(number))),
            ReceiveActivation(number) => Some((stage - 1, SendActivation(number))),
            SendGradient(number) => Some((stage - 1, ReceiveGradient(number))),
            Forward(_) | Backward(_) => None,
        }
    }

    /// Runs all stages. A message needs both of its ends at the same time, and takes none itself. Returns when the last
    /// stage is done; panics if all wait for each other.
    fn simulate(steps: &[Vec<Action>], forward: u32, backward: u32) -> u32 {
        let (mut at, mut clocks) = (vec![0; steps.len()], vec![0; steps.len()]);
        while at.iter().zip(steps).any(|(at, actions)| *at < actions.len()) {
            let mut moved = false;
            for stage in 0..steps.len() {
                let Some(action) = steps[stage].get(at[stage]) else { continue };
                if let Some((peer, expected)) = counterpart(stage, *action) {
                    if steps[peer].get(at[peer]) != Some(&expected) {
                        continue;
                    }
                    let met = clocks[stage].max(clocks[peer]);
                    (clocks[stage], clocks[peer]) = (met, met);
                    at[peer] += 1;
                } else {
                    clocks[stage] += if matches!(action, Forward(_)) { forward } else { backward };
                }
                at[stage] += 1;
                moved = true;
            }
            assert!(
                moved,
                "a deadlock: {:?}",
                at.iter().zip(steps).map(|(at, of)| of.get(*at)).collect::<Vec<_>>()
            );
        }
        clocks.into_iter().max().unwrap()
    }

    #[test]
    fn no_pipeline_deadlocks_and_none_is_idle_for_longer_than_it_must() {
        for stages in 1..=7 {
            for micro_batches in 1..=13 {
                let (forward, backward) = (3, 5);
                let time = simulate(&steps(stages, micro_batches), forward, backward);
                let passes = (stages + micro_batches - 1) as u32;
                assert_eq!(
                    time,
                    passes * (forward + backward),
                    "{stages} stages, {micro_batches} micro-batches"
                );
            }
        }
    }
}

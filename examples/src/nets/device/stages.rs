//! From a plan to launches: what a GPU does in one go.
//!
//! A convolution or dense layer takes the activation function behind it along, and the pooling layer behind that. The
//! convolution's own output is then needed for a moment only, so all such layers share one piece of memory for it, and
//! of their outputs the pooled ones are kept.

use mgpu_kernels::{conv, dense, pool};

use super::super::plan::{Image, Op, Plan};

/// What an activation function that is none multiplies negative values with.
pub(super) use conv::cuda::LINEAR as NO_ACTIVATION;

/// One layer, with those behind it that it takes along.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// A convolution, or a dense layer, which is one of 1×1 on images of 1×1. `index` counts them.
    Product { index: usize, shape: conv::Shape, weight: usize, slope: f32, pool: Option<Pooled> },
    /// As [`Op::Norm`].
    Norm { index: usize, weight: usize, mean: usize },
    /// In place.
    Activation { slope: f32 },
    /// By itself.
    Pool(Pooled),
    /// In place.
    Dropout { probability: f32, layer: usize, image: Image },
}

/// As [`Op::Pool`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Pooled {
    pub(super) index: usize,
    pub(super) shape: pool::Shape,
    pub(super) channels: usize,
}

/// A step and the slots it works on, the same one if in place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stage {
    pub(super) step: Step,
    pub(super) input: usize,
    pub(super) output: usize,
}

/// The steps of a network, and the elements for one image of each of their slots.
#[derive(Debug, Clone)]
pub(super) struct Stages {
    pub(super) stages: Vec<Stage>,
    pub(super) slots: Vec<usize>,
}

impl Stages {
    pub(super) fn of(plan: &Plan) -> Self {
        let mut stages: Vec<Stage> = Vec::new();
        let mut slots = vec![plan.slots[0]];
        let mut products = 0;
        for &super::super::plan::Stage { op, output, .. } in &plan.stages {
            if let Some(stage) = stages.last_mut()
                && let Some(step) = along(stage.step, op)
            {
                stage.step = step;
                slots[stage.output] = plan.slots[output];
                continue;
            }
            let input = slots.len() - 1;
            let in_place = matches!(op, Op::Activation { .. } | Op::Dropout { .. });
            if !in_place {
                slots.push(plan.slots[output]);
            }
            let step = step(op, products);
            products += usize::from(matches!(step, Step::Product { .. }));
            stages.push(Stage { step, input, output: slots.len() - 1 });
        }
        Stages { stages, slots }
    }

    /// The place of the first stage that has parameters, behind the last one if there is none.
    pub(super) fn first_with_parameters(&self) -> usize {
        let has_parameters = |stage: &Stage| matches!(stage.step, Step::Product { .. } | Step::Norm { .. });
        self.stages.iter().position(has_parameters).unwrap_or(self.stages.len())
    }

    /// Elements for one image of the largest product that is pooled at once.
    pub(super) fn unpooled(&self) -> usize {
        let unpooled = self.stages.iter().filter_map(|stage| match stage.step {
            Step::Product { shape, pool: Some(_), .. } => Some(shape.output_len()),
            _ => None,
        });
        unpooled.max().unwrap_or(0)
    }
}

fn step(op: Op, index: usize) -> Step {
    match op {
        Op::Conv { shape, weight } => {
            Step::Product { index, shape, weight, slope: NO_ACTIVATION, pool: None }
        }
        Op::Dense { shape, weight, .. } => {
            let shape = dense::cuda::convolution(&shape);
            Step::Product { index, shape, weight, slope: NO_ACTIVATION, pool: None }
        }
        Op::Norm { index, weight, mean, .. } => Step::Norm { index, weight, mean },
        Op::Activation { slope } => Step::Activation { slope },
        Op::Pool { index, shape, channels } => Step::Pool(Pooled { index, shape, channels }),
        Op::Dropout { probability, layer, image } => Step::Dropout { probability, layer, image },
    }
}

/// `step` with `op` behind it, if it can take that along.
fn along(step: Step, op: Op) -> Option<Step> {
    let Step::Product { index, shape, weight, slope: before, pool: None } = step else { return None };
    match op {
        Op::Activation { slope } if before == NO_ACTIVATION => {
            Some(Step::Product { index, shape, weight, slope, pool: None })
        }
        Op::Pool { index: place, shape: window, channels } => {
            let pool = Some(Pooled { index: place, shape: window, channels });
            Some(Step::Product { index, shape, weight, slope: before, pool })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nets::Spec;

    #[test]
    fn layers_take_along_what_follows_them() {
        let stages = Stages::of(&Plan::new(&Spec::named("deep").unwrap()));
        let kinds: Vec<String> = stages
            .stages
            .iter()
            .map(|stage| match stage.step {
                Step::Product { slope, pool, .. } => format!("product {slope} {}", pool.is_some()),
                Step::Dropout { layer, .. } => format!("dropout {layer}"),
                other => format!("{other:?}"),
            })
            .collect();
        assert_eq!(
            kinds,
            ["product 0 true", "product 0.2 true", "product 0 false", "dropout 9", "product 1 false"]
        );
        assert_eq!(stages.slots, [784, 64 * 14 * 14, 128 * 7 * 7, 1024, 10]);
        assert_eq!(stages.unpooled(), 64 * 28 * 28);
    }

    #[test]
    fn what_does_not_follow_a_product_stands_by_itself() {
        let stages = Stages::of(&Plan::new(&Spec::named("keras").unwrap()));
        let norm = stages.stages.iter().position(|stage| matches!(stage.step, Step::Norm { .. }));
        assert_eq!(norm, Some(2));
        let pooled = &stages.stages[3];
        assert!(matches!(pooled.step, Step::Product { pool: Some(_), .. }));
        assert_eq!((pooled.input, pooled.output), (3, 4));
    }
}

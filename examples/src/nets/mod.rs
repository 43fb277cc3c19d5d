//! The networks of the examples, on the CPU and on GPUs.
//!
//! A [`Spec`] is a list of layers, as in PyTorch's `Sequential`: the index of a layer in the list gives its
//! parameters their names (`0.weight`, `0.bias`, …), so checkpoints and reference runs can be compared tensor by
//! tensor. [`Spec::named`] knows eight networks. A [`Net`] is a spec with memory for batches of up to a given size.
//! It allocates everything once, and nothing in a training step.
//!
//! ```text
//! spec (catalogue) ── shapes, names, offsets, stages (plan) ── initial values (initial)
//!                                     ├── forward and backward on the CPU (net), in `memory`, with the time that each
//!                                     │   stage takes (profile); the same of some of its layers (part)
//!                                     └── the same on a GPU (device)
//! ```
//!
//! All of these are loops over stages. `layers` has a file for each kind of layer, which defines what its stage
//! computes.
//!
//! The caller owns the parameters: one flat slice, described by [`Net::layout`]. Ranks broadcast the same slice, the
//! optimizer updates it, and checkpoints store it. Gradients go to a [`mgpu::GradientSink`], last layer first, each
//! announced when it is final.
//!
//! ```
//! use mgpu_examples::nets::{Mode, Net, Spec};
//! let mut net = Net::new(&Spec::named("lenet5")?, 4, 1);
//! assert_eq!(net.layout().len(), 61_706);
//! let (parameters, buffers) = (net.initial_parameters(1), net.initial_buffers());
//! let logits = net.predict(&parameters, &buffers, &[0.0; 2 * 784]);
//! assert_eq!(logits.len(), 2 * 10);
//! # Ok::<(), mgpu_examples::nets::UnknownNet>(())
//! ```

mod catalogue;
mod device;
mod initial;
mod layers;
mod memory;
mod net;
mod part;
mod plan;
mod profile;
mod spec;
mod tensors;
#[cfg(test)]
mod tests;

pub use catalogue::{UnknownNet, names};
pub use device::{DeviceData, DeviceNet, Neighbours};
pub use layers::{DeviceDropout, DropoutKey, Layer};
pub use mgpu_kernels::conv::Padding;
pub use mgpu_kernels::conv::cpu::ConvPolicy;
pub use mgpu_kernels::loss::Report as LossReport;
pub use mgpu_kernels::pool::Rounding;
pub use net::{Mode, Net};
pub use part::Activations;
pub use profile::{DeviceTimes, Profile, StageTimes};
pub use spec::Spec;

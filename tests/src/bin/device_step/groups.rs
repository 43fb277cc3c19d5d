//! Two groups of ranks train a model each. Errors name ranks of the world.

use std::sync::Arc;

use mgpu::device::DeviceDataParallel;
use mgpu::{Error, Result, World};

use super::{Inputs, config, initial, layout, sgd};

pub(crate) fn check(world: &mut World) -> Result<()> {
    let (device, mut host) = world.communicators()?;
    let colour = Some(world.rank() % 2);
    let device = device.split(colour, 0)?.expect("a rank with a colour has a group");
    let host = host.split(colour, 0)?.expect("a rank with a colour has a group");
    let layout = layout();
    let parameters = initial(&layout);
    let model = DeviceDataParallel::new(Arc::new(device), host, layout, parameters, config(sgd(), 2))?;
    let mut model = model.with_buffers(&[1.0; 3])?;
    let inputs = Inputs::new(&model, 2)?;

    let culprit = world.size() - 1;
    inputs.set_infinite(&model, 0, world.rank() == culprit)?;
    inputs.step(&mut model)?;
    match model.check() {
        Ok(()) if world.rank() % 2 != culprit % 2 => Ok(()),
        Err(Error::NotFinite { rank, tensor, step: 1 }) if world.rank() % 2 == culprit % 2 => {
            assert_eq!((rank, tensor.as_str()), (culprit, "4"));
            Ok(())
        }
        other => panic!("non-finite gradients of rank {culprit}: {other:?}"),
    }
}

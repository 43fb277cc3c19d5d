//! Groups of a world: every collective in several groups at once, overlapping ones among them.

use mgpu::{Communicator, DType, ReduceOp, Result, World};

use super::reference::{assert_equal, input, reduced};
use super::{BufferKind, Case, Collective};

/// The collectives, with lengths on both sides of the limits between paths.
fn cases() -> Vec<Case> {
    let collectives = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast(1),
        Collective::Reduce(2),
        Collective::AllToAll,
        Collective::Gather(1),
        Collective::Scatter(2),
        Collective::Uneven,
        Collective::Messages,
        Collective::Barrier,
    ];
    let lengths = [4, 20_003];
    let kinds = [BufferKind::Arena, BufferKind::Private];
    let case = |collective, len, kind| Case {
        kind,
        offset: 3,
        dtype: DType::F32,
        op: ReduceOp::Sum,
        len,
        collective,
    };
    let all =
        |collective| lengths.into_iter().flat_map(move |len| kinds.map(|kind| case(collective, len, kind)));
    collectives.into_iter().flat_map(all).collect()
}

/// Checks that `comm` consists of these ranks of the world, in this order.
fn assert_members(comm: &Communicator, world_rank: u32, expected: impl Iterator<Item = u32>) {
    let members: Vec<u32> = (0..comm.size()).map(|rank| comm.world_rank(rank)).collect();
    assert_eq!(members, expected.collect::<Vec<_>>());
    assert_eq!(members[comm.rank() as usize], world_rank);
}

/// Splits the world into the rows and columns of a grid, into halves of halves, and in reverse order; runs every
/// collective in all of them, taking turns. Panics at the first wrong element.
///
/// # Errors
/// As the collectives.
pub fn groups(mut world: World) -> Result<()> {
    let (rank, ranks) = (world.rank(), world.size());
    let mut comm = world.communicator()?;
    let width = if ranks > 3 { 3 } else { 2 };
    let (row, column) = (rank / width, rank % width);
    let mut groups = vec![
        comm.split(Some(row), 0)?.expect("a row"),
        comm.split(Some(column), 7)?.expect("a column"),
        world.split(Some(3), -(rank as i32))?.expect("all ranks, in reverse"),
    ];
    assert_members(&groups[0], rank, row * width..ranks.min((row + 1) * width));
    assert_members(&groups[1], rank, (column..ranks).step_by(width as usize));
    assert_members(&groups[2], rank, (0..ranks).rev());
    // A rank without a colour is in no group.
    let rest = comm.split((rank > 0).then_some(0), 0)?;
    assert_eq!(rest.is_none(), rank == 0);
    // A group of a group, in which ranks of the world, the parent and the group all differ.
    let mut parent = rest;
    if let Some(parent) = &mut parent {
        let half = parent.rank() % 2;
        let key = -(parent.rank() as i32);
        let inner = parent.split(Some(half), key)?.expect("a half");
        assert_members(&inner, rank, (1..ranks).filter(|rank| (rank - 1) % 2 == half).rev());
        groups.push(inner);
    }
    groups.extend(parent);
    for case in cases() {
        for group in &mut groups {
            case.run(group)?;
        }
    }
    memory_of_the_world(&mut comm, &mut groups[0])?;
    // Groups outlive the communicator that they were split from.
    drop(comm);
    groups.iter_mut().try_for_each(Communicator::barrier)
}

/// Groups reduce memory of the world in place; the world cannot use that of a group.
fn memory_of_the_world(comm: &mut Communicator, group: &mut Communicator) -> Result<()> {
    for len in [3, 500, 70_000] {
        let mut buffer = comm.allocate(DType::I32, len)?;
        buffer.as_mut_slice().copy_from_slice(&input::<i32>(group.rank(), len));
        let buffer = group.all_reduce(buffer, ReduceOp::Sum)?.wait()?;
        let expected = reduced::<i32>(group.size(), len, ReduceOp::Sum);
        assert_equal(buffer.as_slice::<i32>(), &expected, &|| {
            format!("a group's sum of {len} in memory of the world")
        });
        // The memory of a single rank is private, as is all of it without shared memory.
        let shares_memory = comm.capabilities().shares_memory;
        if shares_memory && group.size() > 1 && group.size() < comm.size() {
            let buffer = group.allocate(DType::I32, len)?;
            let error =
                comm.all_reduce(buffer, ReduceOp::Sum).expect_err("not all ranks have it").to_string();
            assert!(
                error.contains("allocated by a group of ") && error.contains(", without rank "),
                "{error}"
            );
        }
    }
    let mut sum = [1i32];
    comm.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [comm.size() as i32]);

    Ok(())
}

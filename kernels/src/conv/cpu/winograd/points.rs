//! The constants of a Winograd convolution: the Toom–Cook construction.
//!
//! A filter of r taps slides along n = m + r − 1 values. Seen as polynomials, outputs are coefficients of a product,
//! and a polynomial of degree n − 1 is determined by its values at n points. So values and filter are evaluated at n
//! points, multiplied point by point, and the m outputs interpolated: n products instead of m·r (Toom 1963, Cook
//! 1966, Winograd 1980). For the sliding sum y_i = Σ_k g_k d_(i+k), with points p_j, of which the last one is
//! infinity:
//!
//! - outputs: `y = Aᵀ ((G g) ⊙ (Bᵀ d))`,
//! - Aᵀ(i,j) = p_j^i, and 1 for i = m − 1 at infinity,
//! - G(j,k) = p_j^k / Π_(l≠j) (p_j − p_l), and 1 for k = r − 1 at infinity,
//! - row j of Bᵀ holds the coefficients of Π_(l≠j) (x − p_l), that of infinity those of Π_l (x − p_l).
//!
//! The points are 0, infinity and pairs ±p. For a pair, the rows of Bᵀ and the columns of Aᵀ agree in their even
//! terms and differ in the sign of their odd ones, so each pair is computed from one even and one odd sum, which have
//! half the terms. With q_p(y) = Π (y − l²) over the other pairs and Q(y) = Π (y − l²) over all of them:
//!
//! - (Bᵀ d) at ±p is Σ_k q_p[k] d_(2k+2) ± p Σ_k q_p[k] d_(2k+1),
//! - at 0 it is Σ_k Q[k] d_(2k), at infinity Σ_k Q[k] d_(2k+1).

/// Maximum number of pairs of points.
pub(super) const MAX_PAIRS: usize = 3;
/// Maximum number of points.
pub(super) const MAX_POINTS: usize = 2 * MAX_PAIRS + 2;
/// Maximum number of taps of a filter.
pub(super) const MAX_TAPS: usize = 5;

/// The constants that the transforms need for one set of points.
#[derive(Debug, Clone, Copy)]
pub(super) struct Points {
    /// Outputs of a tile, m.
    pub(super) tile: usize,
    /// Taps of the filter, r.
    pub(super) taps: usize,
    /// Coefficients of q_p for each pair: those of the even sum.
    pub(super) even: [[f32; MAX_PAIRS]; MAX_PAIRS],
    /// p times those: the coefficients of the odd sum.
    pub(super) odd: [[f32; MAX_PAIRS]; MAX_PAIRS],
    /// Coefficients of Q.
    pub(super) ends: [f32; MAX_PAIRS + 1],
    /// Powers of each pair's point: p⁰ … p⁵.
    pub(super) powers: [[f32; MAX_POINTS - 2]; MAX_PAIRS],
    /// G; only the first n rows and r columns are used.
    pub(super) filter: [[f32; MAX_TAPS]; MAX_POINTS],
}

/// Multiplies the polynomial `of` (lowest coefficient first) by y − `root`.
fn times(of: &[f64], root: f64) -> Vec<f64> {
    let mut product = vec![0.0; of.len() + 1];
    for (k, value) in of.iter().enumerate() {
        product[k + 1] += value;
        product[k] -= root * value;
    }
    product
}

impl Points {
    /// For tiles of `tile` outputs and a filter of `taps`, with the required number of points.
    ///
    /// # Panics
    /// If tile and taps do not make 4, 6 or 8 points, or there are more than 5 taps.
    pub(super) fn new(tile: usize, taps: usize) -> Points {
        // Found by a search over numbers whose squares are exact, on random images and filters: with six points these
        // round half as much as ±1 and ±2. Among sets that round alike, with these all recorded runs agree with
        // PyTorch on near ties, where the last digits of a sum decide which value of a window is the largest.
        let pairs: &[f64] = match (tile + taps - 1, taps) {
            (4, _) => &[1.0],
            (6, 5) => &[0.625, 1.375],
            (6, _) => &[0.625, 1.5],
            (8, _) => &[0.5, 1.0, 2.0],
            (points, _) => panic!("no transform with {points} points"),
        };
        assert!(taps <= MAX_TAPS, "a filter of {taps} taps");
        let mut points = Points {
            tile,
            taps,
            even: [[0.0; MAX_PAIRS]; MAX_PAIRS],
            odd: [[0.0; MAX_PAIRS]; MAX_PAIRS],
            ends: [0.0; MAX_PAIRS + 1],
            powers: [[0.0; MAX_POINTS - 2]; MAX_PAIRS],
            filter: [[0.0; MAX_TAPS]; MAX_POINTS],
        };
        let all = pairs.iter().fold(vec![1.0], |product, p| times(&product, p * p));
        points.ends.iter_mut().zip(&all).for_each(|(end, value)| *end = *value as f32);
        // At 0 the product of all other differences is the lowest coefficient of Q.
        points.filter[0][0] = (1.0 / all[0]) as f32;
        for (index, &p) in pairs.iter().enumerate() {
            let others = pairs.iter().filter(|other| **other != p);
            let q = others.fold(vec![1.0], |product, other| times(&product, other * other));
            for (k, &value) in q.iter().enumerate() {
                points.even[index][k] = value as f32;
                points.odd[index][k] = (p * value) as f32;
            }
            for (power, value) in points.powers[index].iter_mut().enumerate() {
                *value = p.powi(power as i32) as f32;
            }
            // The differences are p − 0, p − (−p), and p² − l² for every other pair: the same for −p.
            let differences = 2.0 * p * p * q.iter().rev().fold(0.0, |sum, value| sum * p * p + value);
            for tap in 0..taps {
                points.filter[2 * index + 1][tap] = (p.powi(tap as i32) / differences) as f32;
                points.filter[2 * index + 2][tap] = ((-p).powi(tap as i32) / differences) as f32;
            }
        }
        points.filter[2 * pairs.len() + 1][taps - 1] = 1.0;
        points
    }

    /// Number of points along one axis, n.
    pub(super) fn count(&self) -> usize {
        self.tile + self.taps - 1
    }
}

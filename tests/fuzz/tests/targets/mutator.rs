//! Changes of inputs, as a fuzzer makes them.

use rand::{Rng, RngExt as _};

/// One of the inputs with a few changes.
pub(crate) fn mutated(inputs: &[Vec<u8>], dice: &mut impl Rng) -> Vec<u8> {
    let mut input = select(inputs, dice).clone();
    for _ in 0..dice.random_range(1..6) {
        let at = dice.random_range(0..=input.len());
        let end = (at + dice.random_range(0..9)).min(input.len());
        match dice.random_range(0..7) {
            0 => drop(input.drain(at..end)),
            1 => drop(input.splice(at..at, dice.random_iter().take(4))),
            2 => drop(input.splice(at..at, select(BYTES, dice).iter().copied())),
            3 => input.extend_from_within(at..end),
            4 => {
                let other = select(inputs, dice);
                input.truncate(at);
                input.extend(other.iter().skip(dice.random_range(0..=other.len())));
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = match dice.random() {
                        true => *byte ^ 1 << dice.random_range(0..8),
                        false => dice.random(),
                    };
                }
            }
        }
        input.truncate(LONGEST);
    }
    input
}

fn select<'a, T>(from: &'a [T], dice: &mut impl Rng) -> &'a T {
    &from[dice.random_range(0..from.len())]
}

/// Bytes that mean something to a parser.
const BYTES: &[&[u8]] = &[
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b";",
    b"=",
    b" ",
    b"\t",
    b"\r\n",
    b"\0",
    b"\xff",
    b"\x7f",
    b"-",
    b"--b",
    b"0",
    b"1e",
    b"\\u",
    b"\\ud8",
    b"true",
    b"null",
    b"/json",
    b"charset",
    b"utf-8",
    b"boundary",
];

const LONGEST: usize = 1_024;

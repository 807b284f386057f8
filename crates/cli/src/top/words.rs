//! Figures and names as they fit into cells.

use std::time::Duration;

/// The end of a name that is kept when its middle is left out: a port and its colon.
const KEPT_TAIL: usize = 6;

/// A text of `width` characters at most. What is too long loses its middle: a port stands at its end.
pub(super) fn clip(text: &str, width: usize) -> String {
    let len = text.chars().count();
    if len <= width {
        return text.to_owned();
    }
    if width <= KEPT_TAIL + 2 {
        let head: String = text.chars().take(width.saturating_sub(1)).collect();
        return head + if width > 0 { "…" } else { "" };
    }
    let head = text.chars().take(width - 1 - KEPT_TAIL);
    let tail = text.chars().skip(len - KEPT_TAIL);
    head.chain(['…']).chain(tail).collect()
}

/// A quantity in five characters at most, units of 1024: `0`, `999`, `1.5K`, `12K`, `166M`.
pub(super) fn quantity(value: f64) -> String {
    let units = ["", "K", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (value.max(0.0), 0);
    // 1023.6 would be shown as 1024 of its unit.
    while value >= 1023.5 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{value:.0}"),
        _ if value < 9.95 => format!("{value:.1}{}", units[unit]),
        _ => format!("{value:.0}{}", units[unit]),
    }
}

/// An amount of bytes with its unit: `512 B`, `1.5 KiB`.
pub(super) fn amount(bytes: f64) -> String {
    let text = quantity(bytes);
    let number = text.trim_end_matches(|character: char| character.is_ascii_uppercase());
    match &text[number.len()..] {
        "" => format!("{number} B"),
        unit => format!("{number} {unit}iB"),
    }
}

/// A rate, or that it is not known yet.
pub(super) fn rate(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), quantity)
}

/// A time in the largest unit of which it has two at least.
pub(super) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The latest `width` of these as a line of bars, the newest at the right, the highest almost as high as a line is, so that
/// lines stay apart. What is zero is a blank, and what is not has a bar, however low.
pub(super) fn bars(past: impl DoubleEndedIterator<Item = f64>, width: usize) -> String {
    const BARS: [char; 7] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇'];
    let mut latest: Vec<f64> = past.rev().take(width).collect();
    latest.reverse();
    let most = latest.iter().copied().fold(0.0, f64::max);
    let bar = |value: &f64| match *value <= 0.0 {
        true => ' ',
        false => BARS[((value / most * 7.0).ceil() as usize).clamp(1, 7) - 1],
    };
    let blank = width - latest.len();
    std::iter::repeat_n(' ', blank)
        .chain(latest.iter().map(bar))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_keeps_its_end() {
        assert_eq!(clip("web:5432", 8), "web:5432");
        assert_eq!(clip("database:5432", 12), "datab…e:5432");
        assert_eq!(clip("database", 4), "dat…");
        assert_eq!(clip("database", 1), "…");
        assert_eq!(clip("database", 0), "");
        for width in 0..30 {
            let clipped = clip("a-name-of-thirty-characters:80", width);
            assert_eq!(clipped.chars().count(), width);
        }
    }

    #[test]
    fn quantities_have_five_characters_at_most() {
        let cases = [
            (0.0, "0"),
            (0.4, "0"),
            (1023.0, "1023"),
            (1023.5, "1.0K"),
            (1536.0, "1.5K"),
            (10_188.0, "9.9K"),
            (10_240.0, "10K"),
            (1_048_575.0, "1.0M"),
            (174_063_616.0, "166M"),
            (-1.0, "0"),
        ];
        for (value, expected) in cases {
            assert_eq!(quantity(value), expected);
        }
        let mut value = 1.0;
        while value < u64::MAX as f64 {
            assert!(quantity(value).len() <= 5, "{value}");
            value *= 1.01;
        }
    }

    #[test]
    fn amounts_have_their_unit() {
        let cases = [(0.0, "0 B"), (1023.0, "1023 B"), (1536.0, "1.5 KiB")];
        for (bytes, expected) in cases {
            assert_eq!(amount(bytes), expected);
        }
    }

    #[test]
    fn bars_are_as_high_as_their_share_and_never_hide_what_there_is() {
        assert_eq!(bars([0.0, 1.0, 4.0, 7.0].into_iter(), 6), "   ▁▄▇");
        assert_eq!(bars([0.001, 8.0].into_iter(), 2), "▁▇");
        assert_eq!(bars([9.0, 1.0, 2.0].into_iter(), 2), "▄▇");
        assert_eq!(bars([0.0, 0.0].into_iter(), 2), "  ");
        assert_eq!(bars([1.0].into_iter(), 0), "");
    }

    #[test]
    fn ages_have_the_largest_unit_that_says_enough() {
        let of = |seconds| age(Duration::from_secs(seconds));
        assert_eq!(
            [of(119), of(120), of(7200), of(172_800)],
            ["119s", "2m", "2h", "2d"]
        );
    }
}

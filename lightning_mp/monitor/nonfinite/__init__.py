"""A step with a non-finite loss or gradient: noticed, explained by a replay, saved, skipped or rewound."""

"""Steps that are not finite: found, explained, skipped, saved, rewound."""

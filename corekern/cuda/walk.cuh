// Three arrays of one shape walked together: where item number i of the walk lies in each.
//
// corekern/cuda/codec.py merges axes that are contiguous in all three arrays, so most walks have one axis or
// two, and splits walks of 2^31 items or more, so that the divisions are 32-bit. All arithmetic that ends in
// an address is 64-bit. Strides are in elements and may be zero (a broadcast scale) or negative.
#pragma once

constexpr int MAX_OUTER_AXES = 4;

struct Walk {
    unsigned items;         // in all
    unsigned items_in_row;  // along the last axis
    long long row;          // elements along the last axis
    long long shape[MAX_OUTER_AXES];       // of the outer axes; 1 for those not used
    long long source[MAX_OUTER_AXES + 1];  // strides: the outer axes, then the last one
    long long target[MAX_OUTER_AXES + 1];
    long long scale[MAX_OUTER_AXES + 1];
};

struct Place {
    long long column;  // in elements, along the last axis
    long long source, target, scale;
};

__device__ __forceinline__ Place place_of(const Walk& walk, unsigned item, int elements_in_item) {
    unsigned rest = item / walk.items_in_row;
    Place place;
    place.column = static_cast<long long>(item - rest * walk.items_in_row) * elements_in_item;
    place.source = place.column * walk.source[MAX_OUTER_AXES];
    place.target = place.column * walk.target[MAX_OUTER_AXES];
    place.scale = place.column * walk.scale[MAX_OUTER_AXES];
    // Unused axes come first: nothing is left to divide when they are reached.
#pragma unroll
    for (int axis = MAX_OUTER_AXES - 1; axis >= 0; --axis) {
        if (rest == 0) break;
        const unsigned length = static_cast<unsigned>(walk.shape[axis]);
        const unsigned next = rest / length;
        const long long index = rest - next * length;
        rest = next;
        place.source += index * walk.source[axis];
        place.target += index * walk.target[axis];
        place.scale += index * walk.scale[axis];
    }
    return place;
}
